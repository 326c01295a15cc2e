"""Access to the job that a fault is injected into, and to its pods and processes on the throwaway cluster."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from finetune_operator import names
from testing.cluster.fault_injection import Chaos
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.processes import terminate_processes
from testing.cluster.node.pod_processes import find_running_container_id
from testing.cluster.throwaway import ThrowawayCluster
from testing.faults.job_recorder import POLL_SECONDS, JobRecorder
from testing.processes.operator_stack import OPERATOR_NAMESPACE, OperatorInstallation
from testing.processes.waiting import wait_until

RawBody = dict[str, Any]

# errors raised by operations on the cluster, by timeouts and by objects that a fault removed
HARNESS_ERRORS = (HarnessError, RuntimeError, OSError, LookupError, HTTPException, subprocess.SubprocessError)


@dataclass(frozen=True)
class JobUnderTest:
    """A job of the fault matrix.

    `recorder` records the status of the job, so that waiting works while the API server is down. `values` contains what
    the injection measured.
    """

    installation: OperatorInstallation
    chaos: Chaos
    name: str
    recorder: JobRecorder = field(init=False)
    values: dict[str, str | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recorder = JobRecorder(self.installation.api, (self.installation.namespace, self.name), self.output)
        object.__setattr__(self, "recorder", recorder)

    @property
    def cluster(self) -> ThrowawayCluster:
        return self.chaos.cluster

    @property
    def output(self) -> Path:
        return self.installation.get_output_folder(self.name)

    def get_pod_name(self, node_rank: int) -> str:
        """Return the name of the node's pod in the first attempt, into which faults are injected."""
        return f"{self.name}-0-{node_rank}"

    def get_config_map_name(self, *, attempt: int) -> str:
        """Return the name of an attempt's ConfigMap, which may not exist yet."""
        return names.config_map_name(self.name, self.installation.get_job(self.name)["metadata"]["uid"], attempt)

    def get_config_map(self, name: str) -> RawBody:
        body: RawBody = json.loads(self.installation.kubectl("get", "configmap", name, "-o", "json"))
        return body

    def patch(self, patch: RawBody) -> None:
        """Apply a merge patch to the job."""
        self.installation.kubectl("patch", "ftj", self.name, "--type=merge", "-p", json.dumps(patch))

    def get_k8s_node(self, node_rank: int) -> str:
        """Return the Kubernetes node on which the pod runs."""
        pod = self.chaos.get_pod(self.installation.namespace, self.get_pod_name(node_rank))
        return str(pod["spec"]["nodeName"])

    def list_k8s_node_names(self) -> list[str]:
        return [node.name for node in self.cluster.layout.nodes]

    def get_container_pid(self, node_rank: int) -> int:
        """Return the host's pid of the container's PID 1; requires the API server."""
        pod = self.chaos.get_pod(self.installation.namespace, self.get_pod_name(node_rank))
        container = find_running_container_id(pod, names.CONTAINER)
        return next(
            process.pid
            for process in self.chaos.find_processes(pod)
            if process.container_id == container and process.namespace_pid == 1
        )

    def kill_container(self, node_rank: int) -> None:
        terminate_processes([self.get_container_pid(node_rank)], grace_seconds=0)

    def wait_until(self, predicate: Callable[[JobRecorder], bool], *, goal: str, timeout_seconds: float) -> None:
        """Wait until the predicate returns true for the recorder; `goal` is used in the error message.

        Raises: TimeoutError with the phase and the last step of the job.
        """
        deadline = time.monotonic() + timeout_seconds
        while not predicate(self.recorder):
            if time.monotonic() > deadline:
                last_step = self.recorder.steps[-1] if self.recorder.steps else "none"
                raise TimeoutError(
                    f"not {goal} within {timeout_seconds:.0f} s; phase {self.recorder.status.get('phase')},"
                    f" last step {last_step}"
                )
            time.sleep(POLL_SECONDS / 2)

    def wait_for_step(self, step: int) -> None:
        def has_reached_step(recorder: JobRecorder) -> bool:
            return bool(recorder.steps) and recorder.steps[-1].step >= step

        self.wait_until(has_reached_step, goal=f"at step {step}", timeout_seconds=120)

    def list_operator_pods(self) -> list[RawBody]:
        """Return the operator's pods, except terminating ones."""
        output = self.installation.kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "json")
        pods: list[RawBody] = json.loads(output)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def find_leader(self) -> RawBody:
        """Return the operator pod that holds the Lease."""
        leases = json.loads(self.installation.kubectl("get", "leases", "-n", OPERATOR_NAMESPACE, "-o", "json"))["items"]
        lease_holders = {str(lease["spec"].get("holderIdentity")).partition("_")[0] for lease in leases}
        return next(pod for pod in self.list_operator_pods() if pod["metadata"]["name"] in lease_holders)


def wait_until_settled(
    installation: OperatorInstallation, cluster: ThrowawayCluster, *, timeout_seconds: float = 120
) -> None:
    """Wait until all Kubernetes nodes are Ready and two operator replicas, one of them leader, run on different nodes.

    Replicas with a restarted container are replaced, because the kubelet's backoff would delay later runs.
    """
    cluster.wait_until_ready()
    job = JobUnderTest(installation, Chaos(cluster), "none")
    wait_until(
        lambda: is_settled(job), goal="two replicas on two nodes", timeout_seconds=timeout_seconds, interval_seconds=0.5
    )


def is_settled(job: JobUnderTest) -> bool:
    pods = job.list_operator_pods()
    unusable_pods = [pod for pod in pods if count_restarts(pod)]
    k8s_nodes = [pod["spec"].get("nodeName") for pod in pods]
    ready_pods = [pod for pod in pods if is_ready(pod)]
    if len(ready_pods) == len(pods) == 2 and not unusable_pods and len(set(k8s_nodes)) == 1:
        move_operator_pod(job, pods[0])
        return False
    for pod in unusable_pods:
        job.installation.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, pod["metadata"]["name"], "--wait=false")
    if unusable_pods or len(ready_pods) != 2:
        return False
    try:
        return job.find_leader() in ready_pods
    except StopIteration:
        return False


def move_operator_pod(job: JobUnderTest, pod: RawBody) -> None:
    """Replace a replica by one on another Kubernetes node; the scheduler may choose the same node, unless cordoned."""
    k8s_node = pod["spec"]["nodeName"]
    job.installation.kubectl("cordon", k8s_node)
    try:
        job.installation.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, pod["metadata"]["name"])
        wait_until(
            lambda: sum("nodeName" in each["spec"] for each in job.list_operator_pods()) >= 2,
            goal=f"an operator pod has moved from {k8s_node}",
            timeout_seconds=30,
        )
    finally:
        job.installation.kubectl("uncordon", k8s_node)


def count_restarts(pod: RawBody) -> int:
    return sum(status["restartCount"] for status in pod.get("status", {}).get("containerStatuses", ()))


def is_ready(pod: RawBody) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
