"""A Cluster that writes down what is asked of it, in order, and answers what a test prepared."""

from dataclasses import dataclass, field
from typing import Any

from finetune_operator.kube.cluster import ObjectRef

Raw = dict[str, Any]


@dataclass
class RecordingCluster:
    """`fails`: what is raised for a request, by its line in `asked`, which is written all the same."""

    pods: tuple[Raw, ...] = ()
    hidden: dict[str, Raw] = field(default_factory=dict)  # pods by name, which no list shows
    access_modes: dict[str, list[str]] = field(default_factory=dict)
    fails: dict[str, Exception] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    statuses: list[Raw] = field(default_factory=list)

    async def write_status(self, job: Raw, status: Raw) -> Raw:
        self._ask("write status")
        self.statuses.append(status)
        version = str(int(job["metadata"]["resourceVersion"]) + 1)
        return {**job, "metadata": {**job["metadata"], "resourceVersion": version}, "status": status}

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[Raw, ...]:
        self._ask(f"list pods of {namespace}/{job_uid}")
        return self.pods

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        self._ask(f"get {kind} {namespace}/{name}")
        if kind == "Pod":
            return self.hidden.get(name)
        modes = self.access_modes.get(name)
        return None if modes is None else {"metadata": {"name": name}, "spec": {"accessModes": modes}}

    async def create(self, manifest: Raw) -> None:
        self._ask(f"create {manifest['kind']} {manifest['metadata']['name']}")

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        within = "" if grace_seconds is None else f" within {grace_seconds} s"
        self._ask(f"delete {target.kind} {target.name} {target.uid}".rstrip() + within)

    async def emit_event(self, event: Raw) -> None:
        self._ask(f"event {event['reason']}")

    def _ask(self, line: str) -> None:
        self.asked.append(line)
        if line in self.fails:
            raise self.fails[line]
