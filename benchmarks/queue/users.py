"""Users of the queue benchmark: they create jobs, and suspend, resume, cancel or delete some of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.load.job_bodies import JOBS_PATH
from benchmarks.queue.job_plans import JobAction, QueuedJob, build_queued_job
from benchmarks.queue.quota_observer import QuotaObserver
from benchmarks.soak.requests import create, delete, update
from finetune_operator.kube.api_paths import extend_path

POLL_SECONDS = 0.2
MIN_SUSPENDED_SECONDS, MAX_SUSPENDED_SECONDS = 3.0, 15.0


class Users:
    """Performs the actions of the plans; `performed` counts them."""

    def __init__(self, api: Any, observer: QuotaObserver, random_source: random.Random) -> None:
        self.performed: Counter[JobAction] = Counter()
        self._api = api
        self._observer = observer
        self._random_source = random_source

    async def run_job(self, plan: QueuedJob) -> None:
        """Create the job at its time, perform its action, and wait until it has ended."""
        await asyncio.sleep(plan.start_seconds)
        await create(self._api, JOBS_PATH, build_queued_job(plan))
        match plan.action:
            case JobAction.SUSPEND:
                await self._suspend_and_resume(plan)
            case JobAction.CANCEL | JobAction.DELETE:
                await asyncio.sleep(plan.action_seconds)
                await self._end(plan)
        await self._wait_until(lambda: self._observer.has_ended(plan.name))

    async def _suspend_and_resume(self, plan: QueuedJob) -> None:
        observer = self._observer
        await self._wait_until(lambda: observer.is_running(plan.name))
        await asyncio.sleep(plan.action_seconds)
        await self._set(plan, suspend=True)
        await self._wait_until(lambda: observer.has_condition(plan.name, "Suspended") or observer.has_ended(plan.name))
        await asyncio.sleep(self._random_source.uniform(MIN_SUSPENDED_SECONDS, MAX_SUSPENDED_SECONDS))
        await self._set(plan, suspend=False)
        self.performed[plan.action] += 1

    async def _end(self, plan: QueuedJob) -> None:
        if self._observer.has_ended(plan.name):
            return
        self.performed[plan.action] += 1
        if plan.action is JobAction.DELETE:
            await delete(self._api, extend_path(JOBS_PATH, plan.name))
        else:
            await self._set(plan, cancel=True)

    async def _set(self, plan: QueuedJob, **fields: bool) -> None:
        await update(
            self._api, extend_path(JOBS_PATH, plan.name), lambda job: {**job, "spec": {**job["spec"], **fields}}
        )

    async def _wait_until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():  # noqa: ASYNC110  informer event
            await asyncio.sleep(POLL_SECONDS)
