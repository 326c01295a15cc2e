"""Queues of Kueue on a test cluster, and jobs in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from testing.cluster.images.project_images import get_image_name
from testing.processes.operator_stack import OperatorInstallation, has_condition
from testing.processes.waiting import wait_until

API_VERSION = "kueue.x-k8s.io/v1beta2"
WORKLOADS = "workloads.kueue.x-k8s.io"  # Kubernetes has a kind of the same name

RawBody = dict[str, Any]


@dataclass
class Queues:
    """A LocalQueue with its ClusterQueue and ResourceFlavor, all of the same name, and the jobs in it."""

    deployment: OperatorInstallation
    name: str
    jobs: list[str] = field(default_factory=list)

    def create(self, quota: Mapping[str, str], *, topology: str | None = None) -> None:
        """Create the queue with this quota by resource, in which workloads of higher priority preempt others.

        topology: label of Kubernetes nodes by which Kueue places the pods of a job.
        """
        flavor: RawBody = {}
        if topology is not None:
            levels = [{"nodeLabel": topology}, {"nodeLabel": "kubernetes.io/hostname"}]
            self.deployment.apply(build_object("Topology", self.name, {"levels": levels}))
            flavor = {"topologyName": self.name, "nodeLabels": {"kubernetes.io/os": "linux"}}
        resources = [{"name": name, "nominalQuota": amount} for name, amount in {"memory": "64Gi", **quota}.items()]
        covered = [resource["name"] for resource in resources]
        group = {"coveredResources": covered, "flavors": [{"name": self.name, "resources": resources}]}
        cluster_queue = {
            "namespaceSelector": {},
            "resourceGroups": [group],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        self.deployment.apply(
            build_object("ResourceFlavor", self.name, flavor),
            build_object("ClusterQueue", self.name, cluster_queue),
            build_object("LocalQueue", self.name, {"clusterQueue": self.name}),
            *(
                {"apiVersion": API_VERSION, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
                for name, value in (("low", 10), ("high", 1000))
            ),
        )

    def submit(self, name: str, *, program: str = "sleep 600", priority: str | None = None, **fields: Any) -> str:
        """Create a job of two nodes with 500m CPU each that runs a shell command on every node."""
        scheduling = {"queueName": self.name, **({"priorityClassName": priority} if priority else {})}
        defaults = {"resources": {"requests": {"cpu": "500m"}}, "scheduling": scheduling}
        job = f"{self.name}-{name}"
        self.deployment.apply(build_shell_job(job, program, **{**defaults, **fields}))
        self.jobs.append(job)
        return job

    def list_workloads(self) -> list[RawBody]:
        """Return the Workloads of this queue."""
        workloads: list[RawBody] = json.loads(self.deployment.kubectl("get", WORKLOADS, "-o", "json"))["items"]
        return [workload for workload in workloads if workload["spec"].get("queueName") == self.name]

    def get_reserved_cpu(self) -> float:
        """Return the CPUs of the quota that are in use."""
        queue = json.loads(self.deployment.kubectl("get", "clusterqueue", self.name, "-o", "json"))
        (flavor,) = queue.get("status", {}).get("flavorsReservation") or [{"resources": []}]
        total = next((resource["total"] for resource in flavor["resources"]), "0")
        return float(total[:-1]) / 1000 if total.endswith("m") else float(total)

    def remove(self) -> None:
        """Delete the jobs, and then the queue."""
        for job in self.jobs:
            self.deployment.delete(job)
        wait_until(lambda: not self.list_workloads(), goal="the Workloads are deleted")
        for kind in ("localqueue", "clusterqueue", "resourceflavor", "topology"):
            self.deployment.kubectl("delete", kind, self.name, "--ignore-not-found", "--wait", "--timeout=60s")


def build_shell_job(name: str, program: str, **fields: Any) -> RawBody:
    """Return a job that runs a shell command on two nodes; `fields` are further fields of its spec."""
    spec = {
        "image": get_image_name("trainer"),
        "imagePullPolicy": "Never",
        "command": {"exec": ["sh", "-c", program]},
        "numNodes": 2,
        "terminationGracePeriodSeconds": 30,
        **fields,
    }
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}, "spec": spec}


def wait_until_running(
    deployment: OperatorInstallation, job: str, *, attempt: int = 0, timeout_seconds: float = 60
) -> None:
    """Wait until the job runs in this attempt or a later one."""
    deployment.wait_until(
        job,
        lambda body: body.get("status", {}).get("attempt", -1) >= attempt and has_condition(body, "Running"),
        description=f"running in attempt {attempt}",
        timeout_seconds=timeout_seconds,
    )


def build_object(kind: str, name: str, spec: RawBody) -> RawBody:
    """Return an object of Kueue."""
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
