"""Runs FineTuneJobs with the operator."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from benchmarks.load.contender import Collection, ControllerMetrics, LoadRig
from benchmarks.load.job_bodies import JOBS_PATH, RawBody, build_job_body, report_killed_rank
from benchmarks.load.pod_times import PodTimes
from benchmarks.rig import (
    NAMESPACE,
    count_passes,
    count_requests,
    read_metrics,
    start_operator,
    wait_until_operator_ready,
)
from finetune_operator import names
from finetune_operator.kube.api_paths import collection_path
from testing.cluster.host.commands import HarnessError

READY_TIMEOUT_SECONDS = 60.0
FINETUNEJOB_COLLECTIONS = (
    Collection(JOBS_PATH),
    *(Collection(collection_path(kind, NAMESPACE), names.JOB_UID) for kind in ("Pod", "Service", "ConfigMap")),
    Collection(collection_path("Event", NAMESPACE)),
)


class OperatorContender:
    """The operator, in its own process, with the flags of the chart except for leader election."""

    title = "operator"
    pod_label = names.JOB_UID
    collections = FINETUNEJOB_COLLECTIONS

    def __init__(self, rig: LoadRig, log: IO[bytes]) -> None:
        self.pod_times = PodTimes()
        self._rig = rig
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        with start_operator(self._rig.cluster.kubeconfig, self._log) as self._process:
            await wait_until_operator_ready(timeout_seconds=READY_TIMEOUT_SECONDS)
            if self._process.poll() is not None:
                raise HarnessError(
                    f"the operator has ended, another process has its metrics port; see {self._log.name}"
                )
            yield

    def prepare(self, jobs: list[str], *, nodes: int) -> None:
        """Do nothing: the operator gets no help."""

    async def create_job(self, name: str, *, nodes: int) -> None:
        await self._rig.api.call("POST", JOBS_PATH, body=build_job_body(name, nodes))

    async def report_failure(self, pod: RawBody) -> None:
        await report_killed_rank(self._rig.api, pod)

    def list_controllers(self) -> tuple[int, ...]:
        return () if self._process is None else (self._process.pid,)

    def read_metrics(self) -> ControllerMetrics:
        metrics = read_metrics()
        return ControllerMetrics(count_requests(metrics), count_passes(metrics))
