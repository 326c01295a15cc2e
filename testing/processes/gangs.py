"""Jobs of which the scheduler of Kubernetes starts all pods or none, on nodes with a limited extended resource."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from testing.processes.operator_stack import OperatorInstallation
from testing.processes.queues import build_shell_job

PRIORITIES = {"gang-low": 10, "gang-high": 1000}

RawBody = dict[str, Any]


@dataclass
class Gangs:
    """Kubernetes nodes with one slot each, and jobs of which each pod needs one; others do not have these slots."""

    deployment: OperatorInstallation
    prefix: str = field(default_factory=lambda: f"g-{secrets.token_hex(3)}")
    jobs: list[str] = field(default_factory=list)

    @property
    def resource(self) -> str:
        """Extended resource of the slots."""
        return f"example.com/{self.prefix}"

    def create(self) -> None:
        """Give each Kubernetes node one slot, and create the PriorityClasses."""
        self._set_slots(1)
        self.deployment.apply(
            *(
                {
                    "apiVersion": "scheduling.k8s.io/v1",
                    "kind": "PriorityClass",
                    "metadata": {"name": name},
                    "value": value,
                }
                for name, value in PRIORITIES.items()
            )
        )

    def add_room(self) -> None:
        """Give each Kubernetes node a second slot."""
        self._set_slots(2)

    def submit(
        self, name: str, *, nodes: int = 2, program: str = "sleep 600", priority: str | None = None, **fields: Any
    ) -> str:
        """Create a job that runs a shell command on every node."""
        defaults = {
            "numNodes": nodes,
            "nprocPerNode": 1,
            "resources": {"limits": {self.resource: 1}},
            "scheduling": {"priorityClassName": priority} if priority else {},
        }
        job = f"{self.prefix}-{name}"
        self.deployment.apply(build_shell_job(job, program, **{**defaults, **fields}))
        self.jobs.append(job)
        return job

    def list_pod_groups(self, job: str) -> list[RawBody]:
        """Return the PodGroups of a job."""
        output = self.deployment.kubectl("get", "podgroups.scheduling.k8s.io", "-o", "json")
        groups: list[RawBody] = json.loads(output)["items"]
        return [group for group in groups if group["metadata"]["name"].startswith(f"{job}-")]

    def remove(self) -> None:
        """Delete the jobs."""
        for job in self.jobs:
            self.deployment.delete(job)

    def _set_slots(self, number: int) -> None:
        slots = {self.resource: str(number)}
        patch = json.dumps({"status": {"capacity": slots, "allocatable": slots}})  # the kubelet sets the latter later
        for node in json.loads(self.deployment.kubectl("get", "nodes", "-o", "json"))["items"]:
            name = node["metadata"]["name"]
            self.deployment.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)
