"""Measures one contender: single jobs, the launch of many jobs at once, and the restart of all of them at once."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from benchmarks.load.contender import LoadContender, LoadRig
from benchmarks.load.pod_times import AttemptKey
from benchmarks.load.usage import Usage, measure_memory_mib, measure_usage
from benchmarks.rig import NAMESPACE
from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.informer import Informer

TIME_LIMIT_SECONDS = 300.0  # a job that takes longer counts as a job that took this long
SETTLE_SECONDS = 8.0  # after a burst, for writes that follow it, such as status writes that the operator postpones
CLEAN_UP_TIMEOUT_SECONDS = 600.0
WARM_UP_NODES = 2

JobAction = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class LoadSize:
    """Jobs that are launched at once, single jobs, and nodes per job."""

    jobs: int
    nodes: int
    singles: int


@dataclass(frozen=True)
class JobDurations:
    """Seconds from the action on a job until all pods of an attempt exist, and until all run."""

    created: float
    running: float


@dataclass(frozen=True)
class BurstResult:
    """Durations of all jobs of a burst, and what it used."""

    durations: list[JobDurations]
    usage: Usage


@dataclass(frozen=True)
class TurnResult:
    """Result of one turn of a contender."""

    single_launches: list[JobDurations]
    single_restarts: list[JobDurations]
    launch: BurstResult
    restart: BurstResult
    memory_mib: float


class ContenderTurn:
    """One turn of a contender, whose jobs have names with this prefix."""

    def __init__(self, rig: LoadRig, contender: LoadContender, *, size: LoadSize, prefix: str) -> None:
        self._rig = rig
        self._contender = contender
        self._pod_times = contender.pod_times
        self._size = size
        self._singles = [f"{prefix}-single-{number}" for number in range(size.singles)]
        self._burst = [f"{prefix}-{number:03}" for number in range(size.jobs)]
        self._warm_up = f"{prefix}-first"

    async def measure(self) -> TurnResult:
        """Measure single jobs one after the other, then both bursts.

        Raises: TimeoutError if the pods of the first job do not run
        """
        # the first event in the watch of a new CRD may take 2 s
        self._contender.prepare([self._warm_up], nodes=WARM_UP_NODES)
        async with asyncio.timeout(TIME_LIMIT_SECONDS):
            await self._contender.create_job(self._warm_up, nodes=WARM_UP_NODES)
            await self._pod_times.wait_until_running(AttemptKey(self._warm_up, 0), nodes=WARM_UP_NODES)
        self._contender.prepare([*self._singles, *self._burst], nodes=self._size.nodes)
        launches, restarts = [], []
        for job in self._singles:
            launches.append(await self._measure_job(job, self._launch, attempt=0))
            restarts.append(await self._measure_job(job, self._fail_first_node, attempt=1))
        await asyncio.sleep(SETTLE_SECONDS)
        launch = await self._measure_burst(self._burst, self._launch, attempt=0)
        launched = [job for job in self._burst if self._is_running(job)]
        restart = await self._measure_burst(launched, self._fail_first_node, attempt=1)
        memory_mib = measure_memory_mib(self._contender)
        return TurnResult(launches, restarts, launch, restart, memory_mib)

    async def _measure_burst(self, jobs: list[str], action: JobAction, *, attempt: int) -> BurstResult:
        before = await measure_usage(self._rig.cluster, self._contender)
        durations = await asyncio.gather(*(self._measure_job(job, action, attempt=attempt) for job in jobs))
        await asyncio.sleep(SETTLE_SECONDS)
        return BurstResult(durations, await measure_usage(self._rig.cluster, self._contender) - before)

    async def _measure_job(self, job: str, action: JobAction, *, attempt: int) -> JobDurations:
        key, started_at = AttemptKey(job, attempt), time.monotonic()
        created = running = TIME_LIMIT_SECONDS
        try:
            async with asyncio.timeout(TIME_LIMIT_SECONDS):
                await action(job)
                created = await self._pod_times.wait_until_created(key, nodes=self._size.nodes) - started_at
                running = await self._pod_times.wait_until_running(key, nodes=self._size.nodes) - started_at
        except (TimeoutError, ApiError) as error:
            print(f"{job}, attempt {attempt} does not run: {error or 'timeout'}", file=sys.stderr)
        return JobDurations(created, running)

    async def _launch(self, job: str) -> None:
        await self._contender.create_job(job, nodes=self._size.nodes)

    async def _fail_first_node(self, job: str) -> None:
        await self._contender.report_failure(self._pod_times.attempts[AttemptKey(job, 0)].existing[0])

    def _is_running(self, job: str) -> bool:
        return len(self._pod_times.attempts[AttemptKey(job, 0)].running_at) == self._size.nodes


async def run_turn(rig: LoadRig, contender: LoadContender, *, size: LoadSize, prefix: str) -> TurnResult:
    """Start a contender, measure it, delete its objects and stop it."""
    async with watch_pods(rig, contender), contender.run():
        result = await ContenderTurn(rig, contender, size=size, prefix=prefix).measure()
        await clean_up(rig, contender)
        return result


@asynccontextmanager
async def watch_pods(rig: LoadRig, contender: LoadContender) -> AsyncIterator[None]:
    """Keep the pod times of the contender up to date by an informer."""
    path = collection_path("Pod", NAMESPACE)
    informer = Informer(rig.api, path, selector=contender.pod_label, on_change=contender.pod_times.on_pod_event)
    task = asyncio.create_task(informer.run())
    try:
        await informer.synced.wait()
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def clean_up(rig: LoadRig, contender: LoadContender) -> None:
    """Delete all objects of the contender and wait until none is left, so that the next turn begins with none.

    Raises: TimeoutError
    """
    options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0, "propagationPolicy": "Background"}
    async with asyncio.timeout(CLEAN_UP_TIMEOUT_SECONDS):
        for path, selector in contender.collections:
            params = {"labelSelector": selector} if selector else {}
            while (await rig.api.call("GET", path, params={**params, "limit": "1"}))["items"]:
                with suppress(ApiError):  # the deletion of many objects may take longer than the request's timeout
                    await rig.api.call("DELETE", path, body=options, params=params)
                await asyncio.sleep(1.0)
    await asyncio.sleep(SETTLE_SECONDS)
