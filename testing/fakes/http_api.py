"""In-memory Kubernetes API server over HTTP, with scripted faults, for tests of clients.

tests/e2e/test_cluster_client.py verifies its behaviour against a real API server.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import web

from testing.fakes.label_selector import matches_selector

RawBody = dict[str, Any]
KINDS = {
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "events": "Event",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "finetunejobs": "FineTuneJob",
    "leases": "Lease",
    "deployments": "Deployment",
    "workloads": "Workload",
    "podgroups": "PodGroup",
}


@dataclass(frozen=True)
class ResourcePath:
    """A parsed URL path: a collection, an object or a subresource."""

    plural: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None


@dataclass
class ScriptedFault:
    """An error response to the next `times` matching requests; status 0 aborts the connection.

    If `after_execution` is set, the request is executed before the error response is sent.
    """

    method: str
    plural: str
    status: int
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    after_execution: bool = False
    message: str = "a scripted fault"


@dataclass(frozen=True)
class RecordedRequest:
    """A recorded request with its parsed path, parameters and body."""

    method: str
    resource: ResourcePath
    params: dict[str, str]
    body: RawBody | None
    headers: dict[str, str]


class HttpApi:
    """Fake API server; tests can read and change its objects and watch history directly."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], RawBody] = {}
        self.requests: list[RecordedRequest] = []
        self.faults: list[ScriptedFault] = []
        self.allowed_token: str | None = None
        self.refused_rights: set[str] = set()  # such as `create pods` or `update finetunejobs/status`
        self._version = 100
        self._oldest_version = 0
        self._history: list[tuple[int, str, str, RawBody]] = []
        self._watchers: set[asyncio.Queue[bytes | None]] = set()

    def put(self, plural: str, body: RawBody, *, namespace: str = "default") -> RawBody:
        """Create or replace an object, as another client would."""
        metadata = {"namespace": namespace, "uid": str(uuid4()), **body["metadata"]}
        key = (plural, namespace, metadata["name"])
        if (previous := self.objects.get(key)) and "uid" not in body["metadata"]:
            metadata["uid"] = previous["metadata"]["uid"]
        return self._commit("MODIFIED" if previous else "ADDED", key, {**body, "metadata": metadata})

    def remove(self, plural: str, name: str, *, namespace: str = "default", silently: bool = False) -> None:
        """Delete an object, as another client would; if `silently` is set, no watch event is sent."""
        key = (plural, namespace, name)
        deleted = self.objects.pop(key)
        self._version += 1
        deleted = {**deleted, "metadata": {**deleted["metadata"], "resourceVersion": str(self._version)}}
        if not silently:
            self._publish("DELETED", plural, deleted)

    def close_watches(self) -> None:
        """Close all watch streams, as an API server does after a timeout."""
        for queue in self._watchers:
            queue.put_nowait(None)

    def compact(self) -> None:
        """Drop the watch history, so that a watch from an earlier version gets 410 Gone."""
        self._version += 1
        self._oldest_version = self._version
        self._history.clear()

    def restore(self, version: int) -> None:
        """Go back to an earlier resourceVersion with the current objects, as after a restore of etcd from a backup."""
        self._version = version
        self._oldest_version = 0
        self._history.clear()
        self.close_watches()

    def send(self, event: RawBody) -> None:
        """Send an event, such as a BOOKMARK, to all watch streams."""
        for queue in self._watchers:
            queue.put_nowait(json.dumps(event).encode() + b"\n")

    @property
    def open_watch_count(self) -> int:
        """Number of open watch streams."""
        return len(self._watchers)

    @property
    def version(self) -> str:
        """The latest resourceVersion of the server."""
        return str(self._version)

    def find_requests(self, method: str, plural: str) -> list[RecordedRequest]:
        """Return the requests with this method and resource, in order."""
        return [request for request in self.requests if request.method == method and request.resource.plural == plural]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Record a request and return its response."""
        resource = parse_path(request.path)
        body = json.loads(await request.read()) if request.can_read_body else None
        params = dict(request.query)
        self.requests.append(RecordedRequest(request.method, resource, params, body, dict(request.headers)))
        if self.allowed_token and request.headers.get("Authorization") != f"Bearer {self.allowed_token}":
            return build_status_response(401, "Unauthorized", "Unauthorized")
        if (right := _find_right(request.method, resource, params)) in self.refused_rights:
            return build_status_response(403, "Forbidden", f"{resource.plural} {describe_refusal(right)}")
        fault = next(
            (
                scripted_fault
                for scripted_fault in self.faults
                if (scripted_fault.method, scripted_fault.plural) == (request.method, resource.plural)
                and scripted_fault.times
            ),
            None,
        )
        if fault is not None:
            fault.times -= 1
            if fault.after_execution:
                self._respond(request.method, resource, params, body)
            if fault.status == 0:
                assert request.transport is not None
                request.transport.abort()
            return build_status_response(fault.status or 500, "Scripted", fault.message, headers=fault.headers)
        if not resource.plural:
            return web.json_response(discover(request.path))
        if params.get("watch"):
            return await self._watch(request, resource)
        return self._respond(request.method, resource, params, body)

    def _respond(
        self, method: str, resource: ResourcePath, params: dict[str, str], body: RawBody | None
    ) -> web.Response:
        handlers: dict[str, Callable[[], web.Response]] = {
            "GET": lambda: self._get(resource) if resource.name else self._list(resource, params),
            "POST": lambda: self._create(resource, params, body or {}),
            "PUT": lambda: self._update(resource, body or {}),
            "PATCH": lambda: self._patch(resource, params, body or {}),
            "DELETE": lambda: self._delete(resource, body or {}),
        }
        return handlers[method]()

    def _get(self, resource: ResourcePath) -> web.Response:
        body = self.objects.get(_build_key(resource))
        return web.json_response(body) if body else _respond_not_found(resource)

    def _list(self, resource: ResourcePath, params: dict[str, str]) -> web.Response:
        start, limit = int(params.get("continue", 0)), int(params.get("limit", 10**9))
        bodies = [
            self.objects[key] for key in sorted(self.objects) if _matches(self.objects[key], key[0], resource, params)
        ]
        page = [
            {key_name: value for key_name, value in body.items() if key_name not in ("kind", "apiVersion")}
            for body in bodies[start : start + limit]
        ]
        next_page = {"continue": str(start + limit)} if start + limit < len(bodies) else {}
        kind = f"{KINDS[resource.plural]}List"
        return web.json_response(
            {
                "kind": kind,
                "apiVersion": "v1",
                "metadata": {"resourceVersion": self.version, **next_page},
                "items": page,
            }
        )

    def _create(self, resource: ResourcePath, params: dict[str, str], body: RawBody) -> web.Response:
        if "dryRun" in params:
            return web.json_response(body, status=201)
        key = (resource.plural, resource.namespace or "default", body["metadata"]["name"])
        if key in self.objects:
            return build_status_response(409, "AlreadyExists", f"{resource.plural} {key[2]!r} already exists")
        metadata = {**body["metadata"], "namespace": key[1], "uid": str(uuid4())}
        return web.json_response(self._commit("ADDED", key, {**body, "metadata": metadata}), status=201)

    def _update(self, resource: ResourcePath, body: RawBody) -> web.Response:
        stored_body = self.objects.get(_build_key(resource))
        if stored_body is None:
            return _respond_not_found(resource)
        if conflict := _find_conflict(resource, stored_body, body):
            return conflict
        field = "status" if resource.subresource == "status" else "spec"
        updated_body = {**stored_body, field: body[field]}
        if updated_body == stored_body:
            return web.json_response(
                stored_body
            )  # like Kubernetes: an unchanged object gets no new version and no event
        return web.json_response(self._commit("MODIFIED", _build_key(resource), updated_body))

    def _patch(self, resource: ResourcePath, params: dict[str, str], body: RawBody) -> web.Response:
        """Merge a patch into an object; server-side apply, which sends `force`, also creates it."""
        key, stored_body = _build_key(resource), self.objects.get(_build_key(resource))
        if stored_body is None and "force" not in params:
            return _respond_not_found(resource)
        if conflict := _find_conflict(resource, stored_body or {"metadata": {"uid": ""}}, body):
            return conflict
        merged = merge_patch(stored_body or {"metadata": {"uid": str(uuid4())}}, body)
        merged["metadata"]["namespace"] = key[1]
        if "dryRun" in params or merged == stored_body:
            return web.json_response(merged)
        return web.json_response(self._commit("MODIFIED" if stored_body else "ADDED", key, merged))

    def _delete(self, resource: ResourcePath, options: RawBody) -> web.Response:
        stored_body = self.objects.get(_build_key(resource))
        if stored_body is None:
            return _respond_not_found(resource)
        uid = (options.get("preconditions") or {}).get("uid")
        if uid is not None and uid != stored_body["metadata"]["uid"]:
            return build_status_response(409, "Conflict", f"the UID in the precondition ({uid}) does not match")
        self.remove(resource.plural, resource.name or "", namespace=resource.namespace or "default")
        return web.json_response(stored_body)

    async def _watch(self, request: web.Request, resource: ResourcePath) -> web.StreamResponse:
        params = dict(request.query)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        start_version = int(params.get("resourceVersion", 0))
        if start_version < self._oldest_version:
            expired = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": expired}).encode() + b"\n")
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, kind, plural, body in self._history:
            if version > start_version and _matches(body, plural, resource, params):
                queue.put_nowait(_encode_event(kind, body))
        self._watchers.add(queue)
        try:
            async for line in _read_lines(queue):
                event = json.loads(line)
                if event["type"] in ("BOOKMARK", "ERROR") or _matches(
                    event["object"], f"{event['object'].get('kind', '').lower()}s", resource, params
                ):
                    await response.write(line)
        finally:
            self._watchers.discard(queue)
        return response

    def _commit(self, event: str, key: tuple[str, str, str], body: RawBody) -> RawBody:
        self._version += 1
        kind = {"apiVersion": "v1", "kind": KINDS[key[0]]}
        stored_body = {**kind, **body, "metadata": {**body["metadata"], "resourceVersion": self.version}}
        self.objects[key] = stored_body
        self._publish(event, key[0], stored_body)
        return stored_body

    def _publish(self, event: str, plural: str, body: RawBody) -> None:
        self._history.append((self._version, event, plural, body))
        for queue in self._watchers:
            queue.put_nowait(_encode_event(event, body))


def parse_path(path: str) -> ResourcePath:
    """Parse the path of a collection, object or subresource."""
    segments = path.strip("/").split("/")
    segments = segments[2:] if segments[0] == "api" else segments[3:]
    namespace = None
    if len(segments) > 2 and segments[0] == "namespaces":
        namespace, segments = segments[1], segments[2:]
    plural, name, subresource, *_ = [*segments, None, None, None]
    return ResourcePath(plural or "", namespace, name, subresource)


def merge_patch(target: RawBody, patch: RawBody) -> RawBody:
    """Return the result of a JSON merge patch (RFC 7386)."""
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            stored_value = merged.get(key)
            merged[key] = merge_patch(stored_value if isinstance(stored_value, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def discover(path: str) -> RawBody:
    """Return the discovery document of a path, which kopf and the operator request before watching."""
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]

    def build_resource(name: str, kind: str) -> RawBody:
        return {"name": name, "kind": kind, "singularName": kind.lower(), "namespaced": True, "verbs": verbs}

    def build_group(name: str, version: str) -> RawBody:
        group_version = {"groupVersion": f"{name}/{version}", "version": version}
        return {"name": name, "versions": [group_version], "preferredVersion": group_version}

    documents: dict[str, RawBody] = {
        "/api": {"versions": ["v1"]},
        "/api/v1": {"resources": [build_resource("namespaces", "Namespace"), build_resource("events", "Event")]},
        "/apis": {"groups": [build_group("finetune.dev", "v1alpha1"), build_group("apiextensions.k8s.io", "v1")]},
        "/apis/apiextensions.k8s.io/v1": {
            "resources": [build_resource("customresourcedefinitions", "CustomResourceDefinition")]
        },
        "/apis/finetune.dev/v1alpha1": {"resources": [build_resource("finetunejobs", "FineTuneJob")]},
    }
    return documents[path.rstrip("/")]


def build_status_response(
    status: int, reason: str, message: str, *, headers: dict[str, str] | None = None
) -> web.Response:
    """Return an error response with a Kubernetes Status object."""
    body = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}
    return web.json_response(body, status=status, headers=headers)


@asynccontextmanager
async def serve_api(api: HttpApi) -> AsyncIterator[str]:
    """Serve the API on a free port of the loopback interface and yield the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        api.close_watches()
        await runner.cleanup()


async def _read_lines(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (line := await queue.get()) is not None:
        yield line


def _encode_event(event: str, body: RawBody) -> bytes:
    return json.dumps({"type": event, "object": body}).encode() + b"\n"


def _matches(body: RawBody, plural: str, resource: ResourcePath, params: dict[str, str]) -> bool:
    metadata = body["metadata"]
    in_namespace = resource.namespace in (None, metadata["namespace"])
    return plural == resource.plural and in_namespace and matches_selector(body, params.get("labelSelector", ""))


def _find_conflict(resource: ResourcePath, stored_body: RawBody, body: RawBody) -> web.Response | None:
    """Return the response to a change that requires another object, or another version of it."""
    for name in ("resourceVersion", "uid"):
        required = (body.get("metadata") or {}).get(name)
        if required and required != stored_body["metadata"].get(name):
            return build_status_response(409, "Conflict", f"{resource.name}: the object has been modified")
    return None


def describe_refusal(right: str) -> str:
    """Return the message of the authorizer of Kubernetes for a refused right."""
    verb, resource = right.split(" ")
    return (
        f'is forbidden: User "system:serviceaccount:finetune-system:finetune-operator" cannot {verb} resource'
        f' "{resource}" in API group "" in the namespace "default"'
    )


def _find_right(method: str, resource: ResourcePath, params: dict[str, str]) -> str:
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "list"}
    verb = "watch" if params.get("watch") else verbs[method]
    if verb == "list" and resource.name:
        verb = "get"
    return f"{verb} {'/'.join(filter(None, (resource.plural, resource.subresource)))}"


def _build_key(resource: ResourcePath) -> tuple[str, str, str]:
    return resource.plural, resource.namespace or "default", resource.name or ""


def _respond_not_found(resource: ResourcePath) -> web.Response:
    return build_status_response(404, "NotFound", f"{resource.plural} {resource.name!r} not found")
