"""Another job on the cluster, whose pods run on simulated nodes (kwok), so that a fault can set their status."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from finetune_operator import names
from testing.builders.jobs import command
from testing.cluster.images.project_images import get_image_name
from testing.cluster.kubectl_proxy import KubectlProxy, RequestRejected
from testing.cluster.kwok import build_kwok_daemon, start_kwok
from testing.cluster.throwaway import ThrowawayCluster
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.processes.operator_stack import build_example_job
from testing.processes.waiting import wait_until

FAKE_NODES = 20
ON_KWOK = {"nodeSelector": {"type": "kwok"}, "tolerations": [{"operator": "Exists"}]}
_KWOK_LOCK = Lock()

BuildTermination = Callable[[int], RawBody]


def build_command_job(name: str, **fields: Any) -> RawBody:
    """Return a job without volumes that runs `true`."""
    program = command(
        {"exec": ["true"]}, image=get_image_name("operator"), nprocPerNode=1, volumes=None, output=None, resources={}
    )
    return build_example_job(name, **{**program, **fields})


def build_termination(*, exit_code: int, **message: Any) -> RawBody:
    """Return the terminated state of a container whose supervisor reported these fields."""
    text = json.dumps({"final": True, "time": time.time(), **message}, ensure_ascii=False)
    return {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", "message": text}


SUCCEEDED = {"outcome": "succeeded"}
RANK_KILLED = {"outcome": "failed", "errorType": "RankKilled", "signal": 9}


@dataclass(frozen=True)
class KwokJob:
    """A job in a namespace of its own or of the job under test; `largest_status_bytes` is updated by each read."""

    api: KubectlProxy
    name: str
    namespace: str
    num_nodes: int
    _sizes: list[int] = field(default_factory=list)

    @property
    def largest_status_bytes(self) -> int:
        return max(self._sizes, default=0)

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def _path(self) -> str:
        return f"/apis/{names.API_VERSION}/namespaces/{self.namespace}/{names.FINETUNEJOB[2]}/{self.name}"

    def create(self, **fields: Any) -> None:
        body = build_command_job(self.name, numNodes=self.num_nodes, **{"podTemplate": ON_KWOK, **fields})
        self.api.send("POST", self._path.rpartition("/")[0], body)

    def read_status(self) -> RawBody:
        status: RawBody = self.api.send("GET", self._path).get("status") or {}
        self._sizes.append(len(json.dumps(status, ensure_ascii=False, separators=(",", ":")).encode()))
        return status

    def list_pods(self, *, attempt: int) -> list[RawBody]:
        selector = f"{names.JOB_NAME}={self.name},{names.ATTEMPT}={attempt}"
        items: list[RawBody] = self.api.send("GET", f"{self._pods_path}?labelSelector={selector}")["items"]
        return items

    def wait_until(self, predicate: Callable[[RawBody], bool], *, goal: str, timeout_seconds: float) -> float:
        """Wait until the status satisfies the predicate; return the seconds that it took."""
        return wait_until(
            lambda: predicate(self.read_status()), goal=f"{self.name} is {goal}", timeout_seconds=timeout_seconds
        )

    def wait_until_running(self, *, attempt: int, timeout_seconds: float) -> float:
        return self.wait_until(
            lambda status: status.get("phase") == "Running" and status.get("attempt") == attempt,
            goal=f"running attempt {attempt}",
            timeout_seconds=timeout_seconds,
        )

    def end_nodes(self, build: BuildTermination, *, attempt: int = 0, node_ranks: range | None = None) -> None:
        """Write the terminated state of the nodes of an attempt, by default of all of them."""
        pods = {int(pod["metadata"]["labels"][names.NODE_RANK]): pod for pod in self.list_pods(attempt=attempt)}
        ranks = range(self.num_nodes) if node_ranks is None else node_ranks
        self.api.send_all(
            "PUT",
            [
                (f"{self._pods_path}/{pods[rank]['metadata']['name']}/status", build_ended_pod(pods[rank], build(rank)))
                for rank in ranks
            ],
        )

    def delete_pod(self, *, attempt: int, node_rank: int) -> None:
        path = f"{self._pods_path}/{names.pod_name(self.name, attempt, node_rank)}?gracePeriodSeconds=0"
        self.api.send("DELETE", path)

    def delete(self, *, timeout_seconds: float = 120) -> None:
        """Delete the job and wait until its pods are gone."""
        with suppress(RequestRejected):  # the job may be gone
            self.api.send("DELETE", self._path)
        pods = f"{self._pods_path}?labelSelector={names.JOB_NAME}={self.name}&limit=1"
        wait_until(
            lambda: not self.api.send("GET", pods)["items"],
            goal=f"no pod of {self.name} exists",
            timeout_seconds=timeout_seconds,
        )


def build_ended_pod(pod: RawBody, terminated: RawBody) -> RawBody:
    """Return the pod with the status that a kubelet reports after its container has ended."""
    (reported,) = pod["status"].get("containerStatuses") or [{}]
    container = {
        "image": "none",
        "imageID": "",
        "restartCount": 0,
        **reported,
        "name": names.CONTAINER,
        "ready": False,
        "started": False,
        "state": {"terminated": terminated},
    }
    phase = "Failed" if terminated["exitCode"] else "Succeeded"
    return {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": [container]}}


@contextmanager
def run_kwok_job(
    job: JobUnderTest, *, num_nodes: int, suffix: str = "other", namespace: str | None = None, **fields: Any
) -> Iterator[KwokJob]:
    """Create a job on simulated nodes beside the job under test, and delete it at the end."""
    ensure_kwok(job.cluster)
    other = KwokJob(job.installation.api, f"{job.name}-{suffix}", namespace or job.installation.namespace, num_nodes)
    other.create(**fields)
    try:
        yield other
    finally:
        other.delete()


def ensure_kwok(cluster: ThrowawayCluster) -> None:
    """Start the simulated nodes, which run until the cluster is removed."""
    with _KWOK_LOCK:
        if build_kwok_daemon(cluster).pid() is None or not cluster.kubectl.succeeds("get", "node", "kwok-1"):
            start_kwok(cluster, FAKE_NODES)


@contextmanager
def create_namespace(job: JobUnderTest, name: str, **labels: str) -> Iterator[None]:
    """Create a namespace and delete it at the end, without waiting."""
    metadata = {"name": name, "labels": labels}
    job.cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        # without the default ServiceAccount, pods are rejected
        account = ("get", "serviceaccount", "default", "--namespace", name)
        wait_until(lambda: job.cluster.kubectl.succeeds(*account), goal=f"{name} has a ServiceAccount")
        yield
    finally:
        job.cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
