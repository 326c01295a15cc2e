"""Runs TrainJobs with Kubeflow Trainer and JobSet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.kubeflow.objects import JOBSET_NAME_LABEL, build_train_job, build_training_runtime
from benchmarks.load.contender import Collection, ControllerMetrics, LoadRig
from benchmarks.load.job_bodies import FAKE_POD_FIELDS, RawBody, report_killed_rank
from benchmarks.load.pod_times import PodTimes
from benchmarks.rig import NAMESPACE
from finetune_operator.kube.api_paths import build_path, collection_path
from testing.cluster.controller_managers import InstalledManager

RUNTIME_NAME = "load"
TRAINJOBS_PATH = build_path("trainer.kubeflow.org/v1alpha1", "namespaces", NAMESPACE, "trainjobs")


class KubeflowContender:
    """Kubeflow Trainer and JobSet with their upstream configuration; the Job controller creates the pods."""

    title = "Kubeflow"
    pod_label = JOBSET_NAME_LABEL
    collections = (
        Collection(TRAINJOBS_PATH),
        Collection(build_path("jobset.x-k8s.io/v1alpha2", "namespaces", NAMESPACE, "jobsets")),
        Collection(build_path("batch/v1", "namespaces", NAMESPACE, "jobs")),
        *(Collection(collection_path(kind, NAMESPACE)) for kind in ("Pod", "Service", "Event")),
    )

    def __init__(self, rig: LoadRig, managers: tuple[InstalledManager, ...]) -> None:
        self.pod_times = PodTimes()
        self._rig = rig
        self._managers = managers

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        try:
            for manager in self._managers:
                await asyncio.to_thread(manager.start)
            runtime = build_load_runtime()
            await asyncio.to_thread(self._rig.cluster.kubectl.apply, runtime)
            yield
        finally:
            for manager in self._managers:
                await asyncio.to_thread(manager.stop)

    def prepare(self, jobs: list[str], *, nodes: int) -> None:
        """Do nothing: Kubeflow gets no help."""

    async def create_job(self, name: str, *, nodes: int) -> None:
        await self._rig.api.call("POST", TRAINJOBS_PATH, body=build_train_job(name, runtime=RUNTIME_NAME, nodes=nodes))

    async def report_failure(self, pod: RawBody) -> None:
        await report_killed_rank(self._rig.api, pod)

    def list_controllers(self) -> tuple[int, ...]:
        pids = (manager.daemon.pid() for manager in self._managers)
        return tuple(pid for pid in pids if pid is not None)

    def read_metrics(self) -> ControllerMetrics:
        return ControllerMetrics()


def build_load_runtime() -> RawBody:
    """Return a TrainingRuntime whose pods run on kwok nodes."""
    runtime = build_training_runtime(
        RUNTIME_NAME, {**FAKE_POD_FIELDS, "containers": [{"name": "node", "image": "none"}]}
    )
    return {**runtime, "metadata": {**runtime["metadata"], "namespace": NAMESPACE}}
