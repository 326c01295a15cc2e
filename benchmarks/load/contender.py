"""The interface of what `make bench` compares: the operator, the floor and Kubeflow."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.load.job_bodies import RawBody
from benchmarks.load.pod_times import PodTimes
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import ApiPath
from testing.cluster.throwaway import ThrowawayCluster


@dataclass(frozen=True)
class LoadRig:
    """Cluster with kwok nodes, and the client that creates jobs and reports the failures of nodes."""

    cluster: ThrowawayCluster
    api: ApiClient


class Collection(NamedTuple):
    """Objects of one kind in the namespace of the benchmarks that match a label selector."""

    path: ApiPath
    selector: str = ""


@dataclass(frozen=True)
class ControllerMetrics:
    """Counters of a contender's controllers, as far as they have any."""

    requests: Counter[str] = field(default_factory=Counter)  # by verb, resource and status code
    passes: Counter[float] = field(default_factory=Counter)  # by upper bound of the duration in seconds


class LoadContender(Protocol):
    """Runs jobs of a number of nodes, restarting all nodes after one has failed."""

    title: str
    pod_label: str  # all pods of its jobs have this label
    pod_times: PodTimes  # updated by an informer while the contender runs
    collections: tuple[Collection, ...]  # its objects, in the order in which they are deleted

    def run(self) -> AbstractAsyncContextManager[None]:
        """Start the controllers, and stop them at the end, so that they use no CPU in the turns of others."""

    def prepare(self, jobs: list[str], *, nodes: int) -> None:
        """Do what is not part of the measurement, before it begins."""

    async def create_job(self, name: str, *, nodes: int) -> None:
        """Create a job."""

    async def report_failure(self, pod: RawBody) -> None:
        """Replace the status of a pod by that of a failed pod."""

    def list_controllers(self) -> tuple[int, ...]:
        """Return the pids of the controllers; empty if they have no process of their own."""

    def read_metrics(self) -> ControllerMetrics:
        """Return the counters of the controllers."""
