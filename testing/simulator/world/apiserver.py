"""The API server of the simulator: what a client of pods, services and jobs can tell from a real one.

Held against a real API server by tests/e2e/test_simulator_contract.py. Bodies are never changed in place, so that
readers may keep what they were given.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.cluster import COLLECTIONS
from finetune_operator.observation.pods import parse_time

Raw = dict[str, Any]

KINDS = {plural: kind for kind, (_, plural) in COLLECTIONS.items()}
DEFAULT_GRACE_SECONDS = 30
TERMINAL = ("Succeeded", "Failed")
FOREGROUND = "foregroundDeletion"


class Key(NamedTuple):
    """One name."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Change:
    """One commit: what was there, what is there now, who asked for it."""

    version: int
    kind: str
    before: Raw | None
    after: Raw | None
    actor: str
    time: float

    @property
    def body(self) -> Raw:
        """The object as a watch tells it; a deletion carries the last state."""
        body = self.after or self.before
        assert body is not None
        return body

    @property
    def type(self) -> str:
        """ADDED, MODIFIED or DELETED."""
        return "DELETED" if self.after is None else "ADDED" if self.before is None else "MODIFIED"


class SimulatedApiServer:
    """Objects by name, one resourceVersion for all, and every commit in order."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self._objects: dict[Key, Raw] = {}
        self._uids = 0
        self.version = 1
        self.oldest_version = 0  # a watch from before this is 410 Gone
        self.history: list[Change] = []
        self.listeners: list[Callable[[Change], None]] = []
        self.pod_quota: int | None = None  # for operators
        self._committed = asyncio.Event()

    def get(self, key: Key) -> Raw | None:
        """The object of that name."""
        return self._objects.get(key)

    def all(self, kind: str) -> Iterator[tuple[Key, Raw]]:
        """Every object of a kind, as it is now."""
        return iter([(key, body) for key, body in self._objects.items() if key.kind == kind])

    def handle(self, method: str, path: str, *, body: Raw | None, params: dict[str, str], actor: str) -> Raw:
        """Answer one request; raises ApiError."""
        key, status = parse_path(path)
        match method, bool(key.name), status:
            case "GET", True, False:
                return self._read(key)
            case "GET", False, False:
                return self._list(key, params.get("labelSelector", ""))
            case "POST", False, False:
                assert body is not None
                return self.create(body, actor=actor)
            case "PUT", True, _:
                assert body is not None
                return self._put(key, body, "status" if status else "metadata", actor=actor)
            case "DELETE", True, False:
                return self.delete(key, body or {}, actor=actor)
        raise ApiError(f"{method} {path} is not simulated", status=405)

    def create(self, manifest: Raw, *, actor: str) -> Raw:
        """POST: the name must be free, and is not while its object is being deleted."""
        given = manifest["metadata"]
        key = Key(manifest["kind"], given["namespace"], given["name"])
        if there := self._objects.get(key):
            text = f'{COLLECTIONS[key.kind][1]} "{key.name}" already exists'
            text = f"object is being deleted: {text}" if "deletionTimestamp" in there["metadata"] else text
            raise ApiError(text, status=409, reason="AlreadyExists")
        if key.kind == "Pod" and self.pod_quota is not None and self._running_pods() >= self.pod_quota:
            text = f'pods "{key.name}" is forbidden: exceeded quota: few, requested: pods=1, limited: {self.pod_quota}'
            raise ApiError(text, status=403, reason="Forbidden")
        self._uids += 1
        metadata = {**given, "uid": f"uid-{self._uids}", "creationTimestamp": stamp(self.now())}
        body: Raw = {**manifest, "metadata": metadata}
        if key.kind == "Pod":
            body["status"] = {"phase": "Pending"}
        if key.kind == names.FINETUNEJOB_KIND:
            metadata["generation"] = 1
            body.pop("status", None)
        return self._commit(key, body, actor=actor)

    def change(self, key: Key, *, actor: str, **parts: Any) -> Raw | None:
        """Replace top-level parts of an object, as a component of the cluster does; None if it is gone."""
        there = self._objects.get(key)
        if there is None:
            return None
        body = {**there, **parts}
        return there if body == there else self._commit(key, body, actor=actor)

    def delete(self, key: Key, options: Raw, *, actor: str) -> Raw:
        """DELETE: gracefully for a pod that has a kubelet, in the foreground for an owner if asked."""
        there = self._read(key)
        wanted = options.get("preconditions", {}).get("uid")
        if wanted and wanted != there["metadata"]["uid"]:
            raise _conflict(key, f"Precondition failed: UID in precondition: {wanted}, UID in object meta: ...")
        if key.kind == "Pod":
            return self._delete_pod(key, there, options.get("gracePeriodSeconds"), actor=actor)
        if options.get("propagationPolicy") == "Foreground":
            metadata = {**there["metadata"], "deletionTimestamp": stamp(self.now()), "finalizers": [FOREGROUND]}
            return self._commit(key, {**there, "metadata": metadata}, actor=actor)
        return self.remove(key, actor=actor)

    def remove(self, key: Key, *, actor: str) -> Raw:
        """The object is gone at once."""
        before = self._objects.pop(key)
        self._record(key, before, None, actor=actor)
        return before

    def position_after(self, version: int) -> int:
        """Where in the history a watch goes on that has seen this version."""
        position = len(self.history)
        while position and self.history[position - 1].version > version:
            position -= 1
        return position

    async def wait_for_commit(self) -> None:
        """Until the next commit."""
        await self._committed.wait()

    def _running_pods(self) -> int:
        return sum(pod["status"]["phase"] not in TERMINAL for _, pod in self.all("Pod"))

    def _read(self, key: Key) -> Raw:
        if (there := self._objects.get(key)) is None:
            raise ApiError(f'{COLLECTIONS[key.kind][1]} "{key.name}" not found', status=404, reason="NotFound")
        return there

    def _list(self, key: Key, selector: str) -> Raw:
        items = [
            body for k, body in self.all(key.kind) if key.namespace in ("", k.namespace) and matches(body, selector)
        ]
        root, _ = COLLECTIONS[key.kind]
        return {
            "kind": f"{key.kind}List",
            "apiVersion": root.removeprefix("/apis/").removeprefix("/api/"),
            "metadata": {"resourceVersion": str(self.version)},
            "items": items,
        }

    def _put(self, key: Key, body: Raw, part: str, *, actor: str) -> Raw:
        there, given = self._read(key), body["metadata"]
        if given.get("uid", there["metadata"]["uid"]) != there["metadata"]["uid"]:
            raise _conflict(key, f"Precondition failed: UID in precondition: {given['uid']}, UID in object meta: ...")
        if given.get("resourceVersion", "") not in ("", there["metadata"]["resourceVersion"]):
            raise _conflict(key, "the object has been modified; please apply your changes to the latest version")
        changed = {**there, part: body.get(part, {})}
        return there if changed == there else self._commit(key, changed, actor=actor)

    def _delete_pod(self, key: Key, there: Raw, grace: int | None, *, actor: str) -> Raw:
        """A deletion under way can only be hurried, and counts from its own beginning."""
        metadata, phase = there["metadata"], there["status"].get("phase")
        if grace is None:
            grace = there["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
        if grace == 0 or not there["spec"].get("nodeName") or phase in TERMINAL:
            return self.remove(key, actor=actor)
        deadline = self.now() + timedelta(seconds=grace)
        if under_way := parse_time(metadata.get("deletionTimestamp")):
            earlier = metadata["deletionGracePeriodSeconds"]
            if grace >= earlier:
                return there
            deadline = under_way + timedelta(seconds=grace - earlier)
        metadata = {**metadata, "deletionTimestamp": stamp(deadline), "deletionGracePeriodSeconds": grace}
        return self._commit(key, {**there, "metadata": metadata}, actor=actor)

    def _commit(self, key: Key, body: Raw, *, actor: str) -> Raw:
        before = self._objects.get(key)
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version + 1)}}
        self._objects[key] = body
        self._record(key, before, body, actor=actor)
        return body

    def _record(self, key: Key, before: Raw | None, after: Raw | None, *, actor: str) -> None:
        self.version += 1
        if after is None and before is not None:  # the deletion has a version of its own
            before = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.version)}}
        time = asyncio.get_running_loop().time()
        change = Change(self.version, key.kind, before, after, actor, time)
        self.history.append(change)
        for listener in self.listeners:
            listener(change)
        self._committed.set()
        self._committed = asyncio.Event()


def parse_path(path: str) -> tuple[Key, bool]:
    """Kind, namespace and name of a URL path, and whether it ends in /status; what is not there is empty."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    name = parts[1] if len(parts) > 1 else ""
    return Key(KINDS[parts[0]], namespace, name), parts[2:] == ["status"]


def matches(body: Raw, selector: str) -> bool:
    """Whether an object has the labels of a selector, and their values where it names some."""
    labels = body["metadata"].get("labels") or {}
    wanted = (term.partition("=") for term in selector.split(",") if term)
    return all(labels.get(label) == value if equals else label in labels for label, equals, value in wanted)


def stamp(time: datetime) -> str:
    """As the API server writes times: whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _conflict(key: Key, why: str) -> ApiError:
    plural = COLLECTIONS[key.kind][1]
    return ApiError(f'Operation cannot be fulfilled on {plural} "{key.name}": {why}', status=409, reason="Conflict")
