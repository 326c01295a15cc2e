"""Fake Cluster that records its requests in order and returns prepared objects or errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_operator import names
from finetune_operator.kube.cluster import ObjectRef

RawBody = dict[str, Any]


@dataclass
class RecordingCluster:
    """Records each request as one line; `errors` maps such a line to the exception that it raises."""

    pods: tuple[RawBody, ...] = ()
    unlisted_pods: dict[str, RawBody] = field(default_factory=dict)  # pods that only `get` returns, by name
    jobs: dict[str, RawBody] = field(default_factory=dict)  # by name
    workloads: dict[str, RawBody] = field(default_factory=dict)  # by name
    positions: dict[str, int] = field(default_factory=dict)  # of Workloads, in any queue
    access_modes: dict[str, list[str]] = field(default_factory=dict)
    api_versions: tuple[str, ...] = ()
    dropped_fields: frozenset[str] = frozenset()  # fields of a pod spec that the API server does not know
    errors: dict[str, Exception] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    statuses: list[RawBody] = field(default_factory=list)

    async def write_status(self, job: RawBody, status: RawBody) -> RawBody:
        self._record("write status")
        self.statuses.append(status)
        version = str(int(job["metadata"]["resourceVersion"]) + 1)
        return {**job, "metadata": {**job["metadata"], "resourceVersion": version}, "status": status}

    async def list_pods(self, namespace: str, label: str, value: str) -> tuple[RawBody, ...]:
        self._record(f"list pods of {namespace} with {label}={value}")
        return self.pods

    async def get(self, kind: str, namespace: str, name: str) -> RawBody | None:
        self._record(f"get {kind} {namespace}/{name}")
        objects = {"Pod": self.unlisted_pods, names.FINETUNEJOB_KIND: self.jobs, names.WORKLOAD_KIND: self.workloads}
        if kind in objects:
            return objects[kind].get(name)
        modes = self.access_modes.get(name)
        return None if modes is None else {"metadata": {"name": name}, "spec": {"accessModes": modes}}

    async def create(self, manifest: RawBody) -> str:
        self._record(f"create {manifest['kind']} {manifest['metadata']['name']}")
        return f"uid of {manifest['metadata']['name']}"

    async def dry_run_create(self, manifest: RawBody) -> RawBody:
        self._record(f"dry run of {manifest['kind']} {manifest['metadata']['name']}")
        kept = {key: value for key, value in manifest["spec"].items() if key not in self.dropped_fields}
        return {**manifest, "spec": kept}

    async def list_api_versions(self) -> tuple[str, ...]:
        self._record("list API versions")
        return self.api_versions

    async def list_queue_positions(self, namespace: str, queue_name: str) -> Mapping[str, int]:
        self._record(f"list positions in queue {namespace}/{queue_name}")
        return self.positions

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        grace = "" if grace_seconds is None else f" within {grace_seconds} s"
        self._record(f"delete {target.kind} {target.name} {target.uid}".rstrip() + grace)

    async def emit_event(self, event: RawBody) -> None:
        self._record(f"event {event['reason']}")

    def _record(self, line: str) -> None:
        self.requests.append(line)
        if line in self.errors:
            raise self.errors[line]
