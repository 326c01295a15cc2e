"""Drives reconcile until the job ends, with the operator's own queue: a change or a passed time makes a pass."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import JobStatus, Progress
from finetune_cli.local.cluster import LocalCluster
from finetune_cli.local.progress_display import Screen
from finetune_operator.controller.child_cache import Children, JobKey
from finetune_operator.controller.progress_poller import ask
from finetune_operator.controller.reconcile import Pass, Seen, reconcile
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.conditions import finished, suspended
from finetune_operator.kube.cluster import ClusterError
from finetune_operator.observation.pods import Refusal
from finetune_operator.plan.run_plan import Settings

Raw = dict[str, Any]

ASK_EVERY_SECONDS = 1.0
LOCAL_IMAGE = "this-python"  # nothing is pulled; the plan wants a name
HURRIED_GRACE_SECONDS = (5, 0)  # of the second Ctrl-C and of the third


class Drive:
    """One job on this machine, from where it stands to its end or its suspension."""

    def __init__(self, body: Raw, screen: Screen) -> None:
        metadata = body["metadata"]
        self._key = JobKey(metadata["namespace"], metadata["uid"])
        self._body = body
        self._screen = screen
        self._queue: WorkQueue[JobKey] = WorkQueue()
        self._refusals: tuple[Refusal, ...] = ()
        self._progress: Progress | None = None
        self._stops = 0
        self.children = Children(on_change=self._queue.add, present_attempt=lambda _: self._attempt)

    @property
    def job(self) -> Raw:
        """As the person wants it now: after a Ctrl-C, suspended."""
        return {**self._body, "spec": {**self._body["spec"], "suspend": True}} if self._stops else self._body

    @property
    def _attempt(self) -> int | None:
        attempt: int | None = self._body["status"].get("attempt")
        return attempt

    async def run(self, cluster: LocalCluster) -> FineTuneJob:
        """The job at its end; no process of it is left."""
        self._queue.add(self._key)
        run = Pass(cluster, Settings(trainer_image=LOCAL_IMAGE, on_cluster=False), lambda: datetime.now(UTC))
        async with self._asking(cluster):
            try:
                while not self._is_over():
                    async with self._queue.next():
                        await self._pass(run)
            finally:
                await cluster.close()
        return FineTuneJob.parse(self.job)

    def stop(self, cluster: LocalCluster) -> None:
        """Once: save and stop. Again: stop now."""
        self._stops += 1
        if self._stops == 1:
            self._screen.say("stopping: the nodes save a checkpoint (Ctrl-C again: stop without saving)")
            self._queue.add(self._key)
            return
        cluster.hurry(grace_seconds=HURRIED_GRACE_SECONDS[min(self._stops, 3) - 2])

    def _is_over(self) -> bool:
        job = FineTuneJob.parse(self.job)
        return finished(job.status) or (suspended(job, job.status) and job.status.suspend_time is not None)

    async def _pass(self, run: Pass) -> None:
        seen = Seen(
            pods=self.children.pods(self._key),
            gone=self.children.gone(self._key),
            services=self.children.services(self._key),
            progress=self._progress,
            refusals=self._refusals,
        )
        try:
            outcome = await reconcile(run, self.job, seen)
        except ClusterError as error:
            self._screen.say(f"will be tried again: {error}")
            self._queue.retry(self._key)
            return
        self._queue.succeeded(self._key)
        self._body = {**self._body, "status": outcome.job["status"]}
        self._refusals = outcome.refusals
        if outcome.requeue_after is not None:
            self._queue.add_after(self._key, outcome.requeue_after.total_seconds())
        self._screen.show(JobStatus.model_validate(self._body["status"]))

    @contextlib.asynccontextmanager
    async def _asking(self, cluster: LocalCluster) -> AsyncIterator[None]:
        """Meanwhile, node rank 0 is asked how far it is."""
        asking = asyncio.create_task(self._ask(cluster))
        try:
            yield
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

    async def _ask(self, cluster: LocalCluster) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                await asyncio.sleep(ASK_EVERY_SECONDS)
                address = cluster.status_address(self._attempt)
                answer = await ask(session, address) if address else None
                if answer is not None and answer.progress not in (None, self._progress):
                    self._progress = answer.progress
                    self._queue.add(self._key)
