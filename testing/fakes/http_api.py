"""An API server in memory, spoken to over HTTP: enough of Kubernetes to test clients, and faults on demand.

What it claims about Kubernetes is held against a real API server by tests/e2e/test_cluster_client.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import web

from testing.simulator.world.apiserver import matches

Raw = dict[str, Any]
KINDS = {
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "events": "Event",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "finetunejobs": "FineTuneJob",
    "leases": "Lease",
}


@dataclass(frozen=True)
class Place:
    """What a URL path points to."""

    plural: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None


@dataclass
class Fault:
    """The next `times` requests that match are answered wrongly; status 0 cuts the connection.

    With `after` the request is carried out first: the answer is what gets lost.
    """

    method: str
    plural: str
    status: int
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    message: str = "a scripted fault"


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    place: Place
    params: dict[str, str]
    body: Raw | None
    headers: dict[str, str]


class HttpApi:
    """The server. Its objects and its history can be looked at and changed behind the client's back."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Raw] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.allowed_token: str | None = None
        self._version = 100
        self._oldest_version = 0
        self._history: list[tuple[int, str, str, Raw]] = []
        self._watchers: set[asyncio.Queue[bytes | None]] = set()

    def put(self, plural: str, body: Raw, *, namespace: str = "default") -> Raw:
        """Make or replace an object as if somebody else did."""
        metadata = {"namespace": namespace, "uid": str(uuid4()), **body["metadata"]}
        key = (plural, namespace, metadata["name"])
        if (before := self.objects.get(key)) and "uid" not in body["metadata"]:
            metadata["uid"] = before["metadata"]["uid"]
        return self._commit("MODIFIED" if before else "ADDED", key, {**body, "metadata": metadata})

    def remove(self, plural: str, name: str, *, namespace: str = "default", silently: bool = False) -> None:
        """Delete an object as if somebody else did; `silently` lets no watch know."""
        key = (plural, namespace, name)
        gone = self.objects.pop(key)
        self._version += 1
        gone = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self._version)}}
        if not silently:
            self._publish("DELETED", plural, gone)

    def end_watches(self) -> None:
        """Close every stream, as a server does after a while."""
        for queue in self._watchers:
            queue.put_nowait(None)

    def compact(self) -> None:
        """Forget history: a watch from an earlier version is told 410."""
        self._version += 1
        self._oldest_version = self._version
        self._history.clear()

    def send(self, event: Raw) -> None:
        """Put an event of one's own on every stream, such as a BOOKMARK."""
        for queue in self._watchers:
            queue.put_nowait(json.dumps(event).encode() + b"\n")

    @property
    def watches(self) -> int:
        """Streams that are open."""
        return len(self._watchers)

    @property
    def version(self) -> str:
        """The newest resourceVersion."""
        return str(self._version)

    def asked(self, method: str, plural: str) -> list[Request]:
        """Requests of a kind, in order."""
        return [r for r in self.requests if r.method == method and r.place.plural == plural]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Every route."""
        place = parse_path(request.path)
        body = json.loads(await request.read()) if request.can_read_body else None
        params = dict(request.query)
        self.requests.append(Request(request.method, place, params, body, dict(request.headers)))
        if self.allowed_token and request.headers.get("Authorization") != f"Bearer {self.allowed_token}":
            return refuse(401, "Unauthorized", "Unauthorized")
        fault = next(
            (f for f in self.faults if (f.method, f.plural) == (request.method, place.plural) and f.times), None
        )
        if fault is not None:
            fault.times -= 1
            if fault.after:
                self._answer(request.method, place, params, body)
            if fault.status == 0:
                assert request.transport is not None
                request.transport.abort()
            return refuse(fault.status or 500, "Scripted", fault.message, headers=fault.headers)
        if not place.plural:
            return web.json_response(discover(request.path))
        if params.get("watch"):
            return await self._watch(request, place)
        return self._answer(request.method, place, params, body)

    def _answer(self, method: str, place: Place, params: dict[str, str], body: Raw | None) -> web.Response:
        handlers: dict[str, Callable[[], web.Response]] = {
            "GET": lambda: self._get(place) if place.name else self._list(place, params),
            "POST": lambda: self._create(place, body or {}),
            "PUT": lambda: self._update(place, body or {}),
            "DELETE": lambda: self._delete(place, body or {}),
        }
        return handlers[method]()

    def _get(self, place: Place) -> web.Response:
        found = self.objects.get(_key(place))
        return web.json_response(found) if found else _not_found(place)

    def _list(self, place: Place, params: dict[str, str]) -> web.Response:
        start, limit = int(params.get("continue", 0)), int(params.get("limit", 10**9))
        found = [
            self.objects[key] for key in sorted(self.objects) if _matches(self.objects[key], key[0], place, params)
        ]
        page = [
            {k: v for k, v in body.items() if k not in ("kind", "apiVersion")} for body in found[start : start + limit]
        ]
        more = {"continue": str(start + limit)} if start + limit < len(found) else {}
        kind = f"{KINDS[place.plural]}List"
        return web.json_response(
            {"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": self.version, **more}, "items": page}
        )

    def _create(self, place: Place, body: Raw) -> web.Response:
        key = (place.plural, place.namespace or "default", body["metadata"]["name"])
        if key in self.objects:
            return refuse(409, "AlreadyExists", f"{place.plural} {key[2]!r} already exists")
        metadata = {**body["metadata"], "namespace": key[1], "uid": str(uuid4())}
        return web.json_response(self._commit("ADDED", key, {**body, "metadata": metadata}), status=201)

    def _update(self, place: Place, body: Raw) -> web.Response:
        found = self.objects.get(_key(place))
        if found is None:
            return _not_found(place)
        for name in ("resourceVersion", "uid"):
            if (given := body["metadata"].get(name)) and given != found["metadata"][name]:
                return refuse(409, "Conflict", f"{place.name}: the object has been modified")
        changed = (
            {**found, "status": body["status"]} if place.subresource == "status" else {**found, "spec": body["spec"]}
        )
        if changed == found:
            return web.json_response(found)  # as Kubernetes: no new version, no event
        return web.json_response(self._commit("MODIFIED", _key(place), changed))

    def _delete(self, place: Place, options: Raw) -> web.Response:
        found = self.objects.get(_key(place))
        if found is None:
            return _not_found(place)
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted is not None and wanted != found["metadata"]["uid"]:
            return refuse(409, "Conflict", f"the UID in the precondition ({wanted}) does not match")
        self.remove(place.plural, place.name or "", namespace=place.namespace or "default")
        return web.json_response(found)

    async def _watch(self, request: web.Request, place: Place) -> web.StreamResponse:
        params = dict(request.query)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(params.get("resourceVersion", 0))
        if since < self._oldest_version:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, kind, plural, body in self._history:
            if version > since and _matches(body, plural, place, params):
                queue.put_nowait(_line(kind, body))
        self._watchers.add(queue)
        try:
            async for line in _lines(queue):
                event = json.loads(line)
                if event["type"] in ("BOOKMARK", "ERROR") or _matches(
                    event["object"], f"{event['object'].get('kind', '').lower()}s", place, params
                ):
                    await response.write(line)
        finally:
            self._watchers.discard(queue)
        return response

    def _commit(self, event: str, key: tuple[str, str, str], body: Raw) -> Raw:
        self._version += 1
        kind = {"apiVersion": "v1", "kind": KINDS[key[0]]}
        stored = {**kind, **body, "metadata": {**body["metadata"], "resourceVersion": self.version}}
        self.objects[key] = stored
        self._publish(event, key[0], stored)
        return stored

    def _publish(self, event: str, plural: str, body: Raw) -> None:
        self._history.append((self._version, event, plural, body))
        for queue in self._watchers:
            queue.put_nowait(_line(event, body))


def parse_path(path: str) -> Place:
    """The collection or object that a path names."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = None
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource, *_ = [*rest, None, None, None]
    return Place(plural or "", namespace, name, subresource)


def discover(path: str) -> Raw:
    """What kopf and the operator ask before they watch: which groups, versions and resources are served."""
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]

    def resource(name: str, kind: str) -> Raw:
        return {"name": name, "kind": kind, "singularName": kind.lower(), "namespaced": True, "verbs": verbs}

    def group(name: str, version: str) -> Raw:
        served = {"groupVersion": f"{name}/{version}", "version": version}
        return {"name": name, "versions": [served], "preferredVersion": served}

    answers: dict[str, Raw] = {
        "/api": {"versions": ["v1"]},
        "/api/v1": {"resources": [resource("namespaces", "Namespace"), resource("events", "Event")]},
        "/apis": {"groups": [group("finetune.dev", "v1alpha1"), group("apiextensions.k8s.io", "v1")]},
        "/apis/apiextensions.k8s.io/v1": {
            "resources": [resource("customresourcedefinitions", "CustomResourceDefinition")]
        },
        "/apis/finetune.dev/v1alpha1": {"resources": [resource("finetunejobs", "FineTuneJob")]},
    }
    return answers[path.rstrip("/")]


def refuse(status: int, reason: str, message: str, *, headers: dict[str, str] | None = None) -> web.Response:
    """A Status object."""
    body = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}
    return web.json_response(body, status=status, headers=headers)


@asynccontextmanager
async def serving(api: HttpApi) -> AsyncIterator[str]:
    """Serve on a free port of loopback; gives the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        api.end_watches()
        await runner.cleanup()


async def _lines(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (line := await queue.get()) is not None:
        yield line


def _line(event: str, body: Raw) -> bytes:
    return json.dumps({"type": event, "object": body}).encode() + b"\n"


def _matches(body: Raw, plural: str, place: Place, params: dict[str, str]) -> bool:
    metadata = body["metadata"]
    here = place.namespace in (None, metadata["namespace"])
    return plural == place.plural and here and matches(body, params.get("labelSelector", ""))


def _key(place: Place) -> tuple[str, str, str]:
    return place.plural, place.namespace or "default", place.name or ""


def _not_found(place: Place) -> web.Response:
    return refuse(404, "NotFound", f"{place.plural} {place.name!r} not found")
