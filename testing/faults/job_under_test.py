"""One job on the throwaway cluster, seen from whoever is about to break something under it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_operator import names
from testing.cluster.fault_injection import Chaos
from testing.cluster.host.commands import ClusterError
from testing.cluster.host.processes import end_processes
from testing.cluster.node.pod_processes import container_id_of
from testing.cluster.throwaway import ThrowawayCluster
from testing.faults.job_recorder import POLL_SECONDS, Watch
from testing.processes.operator_stack import OPERATOR_NAMESPACE, Stack

Raw = dict[str, Any]

TROUBLE = (ClusterError, RuntimeError, OSError, subprocess.SubprocessError)  # with the cluster, or in waiting for it


@dataclass(frozen=True)
class Scene:
    """`job` is its name. What waits here waits for what `watch` sees, so that it works without an API server too."""

    stack: Stack
    chaos: Chaos
    job: str
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        watch = Watch(self.cluster, (self.stack.namespace, self.job), self.output)
        object.__setattr__(self, "watch", watch)

    @property
    def cluster(self) -> ThrowawayCluster:
        return self.chaos.cluster

    @property
    def output(self) -> Path:
        return self.stack.output(self.job)

    def pod(self, node_rank: int) -> str:
        """Of the first attempt, which all faults strike."""
        return f"{self.job}-0-{node_rank}"

    def machine(self, node_rank: int) -> str:
        """The Kubernetes node that it runs on."""
        pod = self.chaos.pod(self.stack.namespace, self.pod(node_rank))
        return str(pod["spec"]["nodeName"])

    def machines(self) -> list[str]:
        return [node.name for node in self.cluster.layout.nodes]

    def first_process(self, node_rank: int) -> int:
        """Its container's PID 1, by the host's number; found while there still is an API server to ask."""
        pod = self.chaos.pod(self.stack.namespace, self.pod(node_rank))
        container = container_id_of(pod, names.CONTAINER)
        return next(
            process.pid
            for process in self.chaos.processes(pod)
            if process.container_id == container and process.namespace_pid == 1
        )

    def kill_container(self, node_rank: int) -> None:
        end_processes([self.first_process(node_rank)], patience_seconds=0)

    def wait(self, holds: Callable[[Watch], bool], *, what: str, timeout_seconds: float) -> None:
        """Raises TimeoutError, which says where the job stands."""
        deadline = time.monotonic() + timeout_seconds
        while not holds(self.watch):
            if time.monotonic() > deadline:
                last = self.watch.steps[-1] if self.watch.steps else "none"
                raise TimeoutError(
                    f"not {what} within {timeout_seconds:.0f} s; phase {self.watch.status.get('phase')},"
                    f" last step {last}"
                )
            time.sleep(POLL_SECONDS / 2)

    def wait_for_step(self, step: int) -> None:
        def reached(watch: Watch) -> bool:
            return bool(watch.steps) and watch.steps[-1].step >= step

        self.wait(reached, what=f"at step {step}", timeout_seconds=120)

    def finish(self) -> None:
        """Have the program end well at its next step. Raises FileNotFoundError if it never ran, and made no folder: one
        of ours would be closed to the programs."""
        (self.output / "finish").touch()

    def operators(self) -> list[Raw]:
        """The pods of the operator that are to live."""
        listed = self.stack.kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "json")
        pods: list[Raw] = json.loads(listed)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def leader(self) -> Raw:
        """The operator's pod that holds the Lease."""
        leases = json.loads(self.stack.kubectl("get", "leases", "-n", OPERATOR_NAMESPACE, "-o", "json"))["items"]
        holders = {str(lease["spec"].get("holderIdentity")).partition("_")[0] for lease in leases}
        return next(pod for pod in self.operators() if pod["metadata"]["name"] in holders)


def settle(stack: Stack, cluster: ThrowawayCluster, *, timeout_seconds: float = 120) -> None:
    """Until every machine is Ready and two fresh replicas of the operator run on two of them, one of which leads.

    A container that was restarted would wait longer each time it is killed again, and spoil later runs.
    """
    cluster.wait_until_ready()
    scene = Scene(stack, Chaos(cluster), "none")
    deadline = time.monotonic() + timeout_seconds
    while not is_settled(scene):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the operator's replicas did not settle within {timeout_seconds:.0f} s")
        time.sleep(0.5)


def is_settled(scene: Scene) -> bool:
    pods = scene.operators()
    spoiled = [pod for pod in pods if restarts(pod)]
    on = [pod["spec"].get("nodeName") for pod in pods]
    ready = [pod for pod in pods if is_ready(pod)]
    if len(ready) == len(pods) == 2 and not spoiled and len(set(on)) == 1:
        spoiled = pods[:1]  # both on one machine: the scheduler will rather take the other
    for pod in spoiled:
        scene.stack.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, pod["metadata"]["name"], "--wait=false")
    if spoiled or len(ready) != 2:
        return False
    try:
        return scene.leader() in ready
    except StopIteration:
        return False


def restarts(pod: Raw) -> int:
    return sum(status["restartCount"] for status in pod.get("status", {}).get("containerStatuses", ()))


def is_ready(pod: Raw) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
