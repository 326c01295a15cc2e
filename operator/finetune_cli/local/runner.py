"""Runs one job on the local host, with the work queue and the reconcile passes of the operator.

local.resume prepares the status for a second run of the same job. decisions/117 explains why local mode does not use
the controller.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aiohttp

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import JobStatus, Progress
from finetune_cli.local.cluster import LocalCluster
from finetune_cli.progress_display import ProgressDisplay
from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache, JobKey
from finetune_operator.controller.create_backoff import CreateBackoff
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.progress_poller import fetch_status
from finetune_operator.controller.reconcile import PassDependencies, reconcile
from finetune_operator.core.phase import is_finished, is_suspended
from finetune_operator.kube.cluster import ClusterError
from finetune_operator.observation.ownership import RawBody
from finetune_operator.observation.pods import RejectedCreate
from finetune_operator.settings import Settings
from finetune_operator.tasks.workqueue import WorkQueue

POLL_INTERVAL_SECONDS = 1.0
LOCAL_IMAGE = "this-python"  # the plan requires an image name, but no image is pulled
FORCED_GRACE_SECONDS = (5, 0)  # grace periods in seconds after the second and the third Ctrl-C


class LocalRunner:
    """Runs one job from its stored status until it ends or is suspended."""

    def __init__(self, body: RawBody, display: ProgressDisplay) -> None:
        metadata = body["metadata"]
        self._key = JobKey(metadata["namespace"], metadata["uid"])
        self._body = body
        self._display = display
        self._queue: WorkQueue[JobKey] = WorkQueue()
        self._rejected_creates: tuple[RejectedCreate, ...] = ()
        self._backoff = CreateBackoff()
        self._progress: Progress | None = None
        self._stop_requests = 0
        self.children = ChildCache(
            on_change=self._queue.add,
            current_attempt=lambda _: self._attempt,
            is_current_pod=lambda _, pod: pod["metadata"]["labels"][names.ATTEMPT] == str(self._attempt),
        )

    @property
    def job(self) -> RawBody:
        """Job body for the next reconcile pass; suspended after Ctrl-C."""
        return {**self._body, "spec": {**self._body["spec"], "suspend": True}} if self._stop_requests else self._body

    @property
    def _attempt(self) -> int | None:
        attempt: int | None = self._body["status"].get("attempt")
        return attempt

    async def run(self, cluster: LocalCluster) -> FineTuneJob:
        """Run the job until it ends or is suspended, wait for its processes to end, and return the job."""
        self._queue.add(self._key)
        settings = Settings(trainer_image=LOCAL_IMAGE, on_cluster=False)
        dependencies = PassDependencies(cluster, settings, lambda: datetime.now(UTC))
        async with self._poll_progress_in_background(cluster):
            try:
                while not self._has_ended():
                    async with self._queue.next():
                        await self._run_pass(dependencies)
            finally:
                await cluster.close()
        return FineTuneJob.parse(self.job)

    def stop(self, cluster: LocalCluster) -> None:
        """Stop the job. The first call saves a checkpoint; further calls stop without saving."""
        self._stop_requests += 1
        if self._stop_requests == 1:
            self._display.print_line("stopping: the nodes save a checkpoint (Ctrl-C again: stop without saving)")
            self._queue.add(self._key)
            return
        cluster.force_stop(grace_seconds=FORCED_GRACE_SECONDS[min(self._stop_requests, 3) - 2])

    def _has_ended(self) -> bool:
        job = FineTuneJob.parse(self.job)
        return is_finished(job.status) or (is_suspended(job, job.status) and job.status.suspend_time is not None)

    async def _run_pass(self, dependencies: PassDependencies) -> None:
        cached = CachedState(
            pods=self.children.pods(self._key),
            deleted_pods=self.children.deleted_pods(self._key),
            services=self.children.services(self._key),
            progress=self._progress,
            rejected_creates=self._rejected_creates,
            create_delay=timedelta(seconds=self._backoff.remaining_seconds(self._key)),
        )
        try:
            result = await reconcile(dependencies, self.job, cached)
        except ClusterError as error:
            self._display.print_line(f"will be retried: {error}")
            self._queue.retry(self._key)
            return
        self._queue.reset_backoff(self._key)
        self._body = {**self._body, "status": result.job["status"]}
        self._rejected_creates = result.rejected_creates
        if result.has_tried_creates:
            self._backoff.record(self._key, result.rejected_creates)
            if delay := self._backoff.remaining_seconds(self._key):
                self._queue.add_after(self._key, delay)
        if result.requeue_after is not None:
            self._queue.add_after(self._key, result.requeue_after.total_seconds())
        self._display.update(JobStatus.model_validate(self._body["status"]))

    @contextlib.asynccontextmanager
    async def _poll_progress_in_background(self, cluster: LocalCluster) -> AsyncIterator[None]:
        """Poll the progress of node rank 0 in the background."""
        task = asyncio.create_task(self._poll_progress(cluster))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _poll_progress(self, cluster: LocalCluster) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
                attempt = self._attempt
                if attempt is None or (url := cluster.find_status_url(attempt)) is None:
                    continue
                response = await fetch_status(session, url, job_uid=self._key.uid, attempt=attempt)
                if response is not None and response.progress not in (None, self._progress):
                    self._progress = response.progress
                    self._queue.add(self._key)
