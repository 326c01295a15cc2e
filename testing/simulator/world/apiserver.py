"""Simulated API server, which behaves like a real one for clients of pods, services and jobs.

tests/e2e/test_simulator_contract.py compares it with a real API server. Bodies are never changed in
place, so that readers may keep references to them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.api_paths import COLLECTIONS
from finetune_operator.observation.ownership import parse_time
from testing.fakes.label_selector import matches_selector

RawBody = dict[str, Any]

KINDS = {
    **{plural: kind for kind, (_, plural) in COLLECTIONS.items()},
    "podgroups": names.POD_GROUP_KIND,
    "leases": "Lease",
}
PLURALS = {kind: plural for plural, kind in KINDS.items()}
KUEUE_VERSION, POD_GROUP_VERSION = "kueue.x-k8s.io/v1beta2", "scheduling.k8s.io/v1beta1"
DEFAULT_GRACE_SECONDS = 30
TERMINAL = ("Succeeded", "Failed")
FOREGROUND = "foregroundDeletion"
GATED_CONDITION = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "SchedulingGated",
    "message": "scheduling gates",
}


class ObjectKey(NamedTuple):
    """Kind, namespace and name of an object."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Change:
    """One commit, with the object before and after it and the actor that requested it.

    actor: name of a component; in a pass of an operator, `operator-N/` and the uid of the job.
    """

    version: int
    kind: str
    old_body: RawBody | None
    new_body: RawBody | None
    actor: str
    time: float

    @property
    def body(self) -> RawBody:
        """Object in the watch event, in its new state or, for a deletion, in its last state."""
        body = self.new_body or self.old_body
        assert body is not None
        return body

    @property
    def acting_job_uid(self) -> str:
        """Uid of the job in whose pass the operator requested the change; empty if it was not requested in a pass."""
        return self.actor.partition("/")[2]

    @property
    def type(self) -> str:
        """Type of the watch event: ADDED, MODIFIED or DELETED."""
        return "DELETED" if self.new_body is None else "ADDED" if self.old_body is None else "MODIFIED"


class SimulatedApiServer:
    """In-memory API server with one resourceVersion counter for all kinds and a history of all commits."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self._objects: defaultdict[str, dict[ObjectKey, RawBody]] = defaultdict(dict)  # by kind
        self._last_uid = 0
        self.version = 1
        self.oldest_version = 0  # a watch from an older version fails with 410 Gone
        self.history: list[Change] = []
        self.listeners: list[Callable[[Change], None]] = []
        self.pod_quotas: dict[str, int] = {}  # maximum number of active pods by namespace
        self.mutate_pod: Callable[[RawBody], RawBody] = lambda manifest: manifest  # admission webhook of new pods
        self.served_versions = {KUEUE_VERSION}  # of the APIs that a cluster may lack
        self.keeps_scheduling_groups = True  # feature gate GenericWorkload, without which pods lose the field
        self.rejects_pod_groups = False  # a ResourceQuota has no room for another PodGroup
        self.unserved: set[ObjectKey] = set()  # objects of requests that failed because their API was not served
        self.dry_runs: list[RawBody] = []  # objects of all dry runs, as they would be stored
        self._committed = asyncio.Event()

    def get(self, key: ObjectKey) -> RawBody | None:
        """Return the object with this key, or None."""
        return self._objects[key.kind].get(key)

    def list_objects(self, kind: str) -> Iterator[tuple[ObjectKey, RawBody]]:
        """Iterate over the current objects of a kind."""
        return iter(list(self._objects[kind].items()))

    def handle(self, method: str, path: str, *, body: RawBody | None, params: dict[str, str], actor: str) -> RawBody:
        """Handle a request and return the response.

        Raises: ApiError
        """
        if path == "/apis":
            return {"groups": [{"versions": [{"groupVersion": version}]} for version in sorted(self.served_versions)]}
        if path.startswith("/apis/visibility.kueue.x-k8s.io/"):  # Kueue does not have to serve positions
            raise ApiError("the server could not find the requested resource", status=404, reason="NotFound")
        key, status = parse_path(path)
        if key.kind == names.POD_GROUP_KIND and POD_GROUP_VERSION not in self.served_versions:
            self.unserved.add(key)
            raise ApiError("the server could not find the requested resource", status=404, reason="NotFound")
        match method, bool(key.name), status:
            case "GET", True, False:
                return self._read(key)
            case "GET", False, False:
                return self._list(key, params.get("labelSelector", ""))
            case "POST", False, False:
                assert body is not None
                return self.create(body, actor=actor, is_dry_run=params.get("dryRun") == "All")
            case "PUT", True, _:
                assert body is not None
                return self._put(
                    key, body, "status" if status else "spec" if key.kind == "Lease" else "metadata", actor=actor
                )
            case "DELETE", True, False:
                return self.delete(key, body or {}, actor=actor)
        raise ApiError(f"{method} {path} is not simulated", status=405)

    def create(self, manifest: RawBody, *, actor: str, is_dry_run: bool = False) -> RawBody:
        """Create an object; its name remains in use until the object is removed. A dry run does not store it."""
        key = ObjectKey(manifest["kind"], manifest["metadata"]["namespace"], _choose_name(manifest["metadata"]))
        if existing := self._objects[key.kind].get(key):
            message = f'{PLURALS[key.kind]} "{key.name}" already exists'
            message = f"object is being deleted: {message}" if "deletionTimestamp" in existing["metadata"] else message
            raise ApiError(message, status=409, reason="AlreadyExists")
        self._check_quotas(key)
        if key.kind == "Pod":
            manifest = self.mutate_pod(self._drop_disabled_fields(manifest))
        if is_dry_run:
            self.dry_runs.append(manifest)
            return manifest
        self._last_uid += 1
        metadata = {
            **manifest["metadata"],
            "uid": f"{self._last_uid:08x}-0000-4000-8000-000000000000",
            "creationTimestamp": format_time(self.now()),
        }
        body: RawBody = {**manifest, "metadata": metadata}
        if key.kind == "Pod":
            body["status"] = {"phase": "Pending"}
            if body["spec"].get("schedulingGates"):
                body["status"]["conditions"] = [GATED_CONDITION]
        if key.kind == names.FINETUNEJOB_KIND:
            metadata["generation"] = 1
            body.pop("status", None)
        return self._commit(key, body, actor=actor)

    def replace_fields(self, key: ObjectKey, *, actor: str, **fields: Any) -> RawBody | None:
        """Replace top-level fields of an object as a cluster component; return None if it does not exist."""
        existing = self._objects[key.kind].get(key)
        if existing is None:
            return None
        body = {**existing, **fields}
        return existing if body == existing else self._commit(key, body, actor=actor)

    def delete(self, key: ObjectKey, options: RawBody, *, actor: str) -> RawBody:
        """Delete an object, gracefully if it is a pod with a kubelet, and in the foreground if requested."""
        existing = self._read(key)
        expected_uid = options.get("preconditions", {}).get("uid")
        if expected_uid and expected_uid != existing["metadata"]["uid"]:
            raise _conflict_error(
                key, f"Precondition failed: UID in precondition: {expected_uid}, UID in object meta: ..."
            )
        if key.kind == "Pod":
            return self._delete_pod(key, existing, options.get("gracePeriodSeconds"), actor=actor)
        if options.get("propagationPolicy") == "Foreground":
            metadata = {
                **existing["metadata"],
                "deletionTimestamp": format_time(self.now()),
                "finalizers": [FOREGROUND],
            }
            return self._commit(key, {**existing, "metadata": metadata}, actor=actor)
        return self.remove(key, actor=actor)

    def remove(self, key: ObjectKey, *, actor: str) -> RawBody:
        """Remove the object without a grace period; one with finalizers stays until they are removed."""
        existing = self._objects[key.kind][key]
        metadata = existing["metadata"]
        if set(metadata.get("finalizers", ())) - {FOREGROUND}:
            deletion_time = metadata.get("deletionTimestamp") or format_time(self.now())
            metadata = {**metadata, "deletionTimestamp": deletion_time, "deletionGracePeriodSeconds": 0}
            return self.replace_fields(key, actor=actor, metadata=metadata) or existing
        old_body = self._objects[key.kind].pop(key)
        self._record(key, old_body, None, actor=actor)
        return old_body

    def remove_finalizer(self, key: ObjectKey, finalizer: str, *, actor: str) -> None:
        """Remove a finalizer, and the object if it was deleted and has no grace period left."""
        metadata = (self._objects[key.kind].get(key) or {"metadata": {}})["metadata"]
        if finalizer not in metadata.get("finalizers", ()):
            return
        finalizers = [name for name in metadata["finalizers"] if name != finalizer]
        self.replace_fields(key, actor=actor, metadata={**metadata, "finalizers": finalizers})
        if not finalizers and metadata.get("deletionGracePeriodSeconds") == 0:
            self.remove(key, actor=actor)

    def find_position_after(self, version: int) -> int:
        """Return the index in the history at which a watch from this version starts."""
        position = len(self.history)
        while position and self.history[position - 1].version > version:
            position -= 1
        return position

    async def wait_for_commit(self) -> None:
        """Wait until the next commit."""
        await self._committed.wait()

    def _check_quotas(self, key: ObjectKey) -> None:
        """Raise an error if the ResourceQuota of the namespace has no room for another object."""
        message = ""
        quota = self.pod_quotas.get(key.namespace) if key.kind == "Pod" else None
        if quota is not None and self._count_active_pods(key.namespace) >= quota:
            message = f'pods "{key.name}" is forbidden: exceeded quota: few, requested: pods=1, limited: {quota}'
        if key.kind == names.POD_GROUP_KIND and self.rejects_pod_groups:
            message = f'podgroups.scheduling.k8s.io "{key.name}" is forbidden: exceeded quota: few'
        if message:
            raise ApiError(message, status=403, reason="Forbidden")

    def _drop_disabled_fields(self, pod: RawBody) -> RawBody:
        """Return the pod without the fields of disabled feature gates."""
        if self.keeps_scheduling_groups or "schedulingGroup" not in pod["spec"]:
            return pod
        spec = {field: value for field, value in pod["spec"].items() if field != "schedulingGroup"}
        return {**pod, "spec": spec}

    def _count_active_pods(self, namespace: str) -> int:
        pods = (pod for key, pod in self.list_objects("Pod") if key.namespace == namespace)
        return sum(pod["status"]["phase"] not in TERMINAL for pod in pods)

    def _read(self, key: ObjectKey) -> RawBody:
        if (existing := self._objects[key.kind].get(key)) is None:
            raise ApiError(f'{PLURALS[key.kind]} "{key.name}" not found', status=404, reason="NotFound")
        return existing

    def _list(self, key: ObjectKey, selector: str) -> RawBody:
        items = [
            body
            for k, body in self.list_objects(key.kind)
            if key.namespace in ("", k.namespace) and matches_selector(body, selector)
        ]
        api_version, _ = COLLECTIONS[key.kind]
        return {
            "kind": f"{key.kind}List",
            "apiVersion": api_version,
            "metadata": {"resourceVersion": str(self.version)},
            "items": items,
        }

    def _put(self, key: ObjectKey, body: RawBody, section: str, *, actor: str) -> RawBody:
        existing, new_metadata = self._read(key), body["metadata"]
        if new_metadata.get("uid", existing["metadata"]["uid"]) != existing["metadata"]["uid"]:
            raise _conflict_error(
                key, f"Precondition failed: UID in precondition: {new_metadata['uid']}, UID in object meta: ..."
            )
        if new_metadata.get("resourceVersion", "") not in ("", existing["metadata"]["resourceVersion"]):
            raise _conflict_error(key, "the object has been modified; please apply your changes to the latest version")
        updated = {**existing, section: body.get(section, {})}
        return existing if updated == existing else self._commit(key, updated, actor=actor)

    def _delete_pod(self, key: ObjectKey, existing: RawBody, grace_seconds: int | None, *, actor: str) -> RawBody:
        """Delete a pod; later requests can only shorten the grace period, which starts at the first request."""
        metadata, phase = existing["metadata"], existing["status"].get("phase")
        if grace_seconds is None:
            grace_seconds = existing["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
        if grace_seconds == 0 or not existing["spec"].get("nodeName") or phase in TERMINAL:
            return self.remove(key, actor=actor)
        deadline = self.now() + timedelta(seconds=grace_seconds)
        if previous_deadline := parse_time(metadata.get("deletionTimestamp")):
            earlier_grace = metadata["deletionGracePeriodSeconds"]
            if grace_seconds >= earlier_grace:
                return existing
            deadline = previous_deadline + timedelta(seconds=grace_seconds - earlier_grace)
        metadata = {**metadata, "deletionTimestamp": format_time(deadline), "deletionGracePeriodSeconds": grace_seconds}
        return self._commit(key, {**existing, "metadata": metadata}, actor=actor)

    def _commit(self, key: ObjectKey, body: RawBody, *, actor: str) -> RawBody:
        old_body = self._objects[key.kind].get(key)
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version + 1)}}
        self._objects[key.kind][key] = body
        if key.kind == "Lease":
            self.version += 1  # not recorded, because nobody watches it and it changes every two seconds
        else:
            self._record(key, old_body, body, actor=actor)
        return body

    def _record(self, key: ObjectKey, old_body: RawBody | None, new_body: RawBody | None, *, actor: str) -> None:
        self.version += 1
        if new_body is None and old_body is not None:  # a deletion increments the version
            old_body = {**old_body, "metadata": {**old_body["metadata"], "resourceVersion": str(self.version)}}
        time = asyncio.get_running_loop().time()
        change = Change(self.version, key.kind, old_body, new_body, actor, time)
        self.history.append(change)
        for listener in self.listeners:
            listener(change)
        self._committed.set()
        self._committed = asyncio.Event()


def parse_path(path: str) -> tuple[ObjectKey, bool]:
    """Return the key of a URL path and whether it ends in /status; the name of a list path is empty."""
    segments = path.strip("/").split("/")
    segments = segments[2:] if segments[0] == "api" else segments[3:]
    namespace = ""
    if segments[0] == "namespaces":
        namespace, segments = segments[1], segments[2:]
    name = segments[1] if len(segments) > 1 else ""
    return ObjectKey(KINDS[segments[0]], namespace, name), segments[2:] == ["status"]


def format_time(time: datetime) -> str:
    """Format a time in whole seconds, as the API server does."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _choose_name(metadata: RawBody) -> str:
    """Return the name of a new object, or one that begins with generateName."""
    return str(metadata.get("name") or f"{metadata['generateName']}x7k2p")


def _conflict_error(key: ObjectKey, message: str) -> ApiError:
    plural = PLURALS[key.kind]
    return ApiError(f'Operation cannot be fulfilled on {plural} "{key.name}": {message}', status=409, reason="Conflict")
