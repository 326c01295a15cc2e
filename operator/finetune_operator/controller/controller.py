"""Joins the watches, the queue and reconcile: what changes is queued, what is queued gets a pass."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta

from finetune_operator import names
from finetune_operator.controller.child_cache import Children, JobKey
from finetune_operator.controller.job_cache import Jobs, job_key, job_label
from finetune_operator.controller.progress_poller import ProgressPoller
from finetune_operator.controller.reconcile import Pass, Seen, reconcile
from finetune_operator.controller.workqueue import QueueClosed, WorkQueue
from finetune_operator.kube.api_client import ApiServer, Raw
from finetune_operator.kube.cluster import ClusterError, Conflict, NotFound, collection_path, read_job
from finetune_operator.kube.informer import Informer
from finetune_operator.metrics import Metrics
from finetune_operator.observation.pods import Refusal

logger = logging.getLogger(__name__)

SELECTOR = names.JOB_UID  # whatever its value: one that a LIST for a decision finds is one that the watches tell of
SWEEP_SECONDS = 60.0
BURST_SECONDS = 0.02
Namespaces = tuple[str, ...] | tuple[None]  # (None,) is the whole cluster


class Controller:
    """All state that lives longer than a pass. It can be lost at any moment: the cluster has the truth."""

    def __init__(self, api: ApiServer, run: Pass, metrics: Metrics, *, namespaces: Namespaces) -> None:
        self._api = api
        self._run = run
        self._metrics = metrics
        self._namespaces = namespaces
        self._refusals: dict[JobKey, tuple[Refusal, ...]] = {}
        self._complaints: dict[JobKey, str] = {}  # of passes that failed, until one succeeds
        self._written: dict[JobKey, float] = {}  # when we last wrote the job's status, monotonic
        self._leading: Callable[[], bool] = lambda: False
        self.jobs = Jobs()
        self.queue: WorkQueue[JobKey] = WorkQueue(on_wait=metrics.queue_wait.observe)
        self.children = Children(on_change=self.stir, present_attempt=self.jobs.attempt)
        self.progress = ProgressPoller(self.jobs, self.children, on_progress=self.wake)
        self.informers = tuple(
            Informer(api, collection_path(kind, namespace), selector=SELECTOR, on_change=hear)
            for kind, hear in (("Pod", self.children.pod_changed), ("Service", self.children.service_changed))
            for namespace in namespaces
        )

    def wake(self, key: JobKey) -> None:
        """Queue a job; not on a standby, which queues them all when it takes over."""
        if key in self.jobs and self._leading():
            self.queue.add(key)

    def stir(self, key: JobKey) -> None:
        """Queue a job whose children change: they do so in bursts, and one pass sees a whole burst."""
        if key in self.jobs and self._leading():
            self.queue.add_after(key, BURST_SECONDS)

    def take(self, body: Raw) -> None:
        """Hear of a job as it is now."""
        if self.jobs.offer(body):
            self.wake(job_key(body))

    def drop(self, key: JobKey) -> None:
        """Hear that a job is gone; its children are the garbage collector's."""
        self.jobs.drop(key)
        self.queue.forget(key)
        self.children.forget(key)
        self.progress.forget(key)
        self._refusals.pop(key, None)
        self._complaints.pop(key, None)
        self._written.pop(key, None)

    async def list_jobs(self) -> None:
        """Compare with the API server; heals what kopf's watch missed, a deletion in a gap above all."""
        for namespace in self._namespaces:
            listed: list[Raw] = []
            version = ""
            async for page in self._api.pages(collection_path(names.FINETUNEJOB_KIND, namespace)):
                listed.extend(page["items"])
                version = page["metadata"]["resourceVersion"]
            for body in listed:
                self.take(body)
            for key in self.jobs.missing_from(listed, list_version=version):
                if namespace in (None, key.namespace):
                    self.drop(key)

    async def sweep(self) -> None:
        """Let go of old tombstones, for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.children.sweep()

    def lead(self, leading: Callable[[], bool]) -> None:
        """From now on act, for as long as `leading` says so."""
        self._leading = leading
        for key in self.jobs:
            self.queue.add(key)

    async def work(self) -> None:
        """One worker: pass after pass, until the queue is closed or the lease is lost."""
        try:
            while True:
                async with self.queue.next() as key:
                    if not self._leading():
                        return
                    await self._pass(key)
        except QueueClosed:
            return

    async def _pass(self, key: JobKey) -> None:
        job = self.jobs.get(key)
        if job is None:
            self.queue.forget(key)
            return
        began = time.monotonic()
        result = "error"
        try:
            result = await self._reconcile(key, job)
        except ClusterError as error:
            result = type(error).__name__
            pause = self.queue.retry(key, at_least=error.retry_after or 0.0)
            known = isinstance(error, Conflict) or self._complaints.get(key) == str(error)
            level = logging.DEBUG if known else logging.WARNING
            self._complaints[key] = str(error)
            said = {"job": job_label(job), "pause": round(pause, 3)}
            logger.log(level, "pass failed, will be repeated: %s", error, extra=said)
        except Exception:  # the outermost loop: one job's bug must not stop the others
            pause = self.queue.retry(key)
            said = {"job": job_label(job), "pause": round(pause, 3)}
            logger.exception("pass failed for a reason that nobody foresaw, will be repeated", extra=said)
        finally:
            self._metrics.reconcile.labels(result).observe(time.monotonic() - began)

    async def _reconcile(self, key: JobKey, job: Raw) -> str:
        try:
            if key in self._complaints:  # a write that failed may have been done, and only its answer lost
                job = await read_job(self._api, job)
            outcome = await reconcile(self._run, job, self._see(key))
        except NotFound:
            self.drop(key)
            return "gone"
        if key not in self.jobs:  # deleted meanwhile: what comes back from the pass must not revive it
            return "gone"
        self.queue.succeeded(key)
        self._complaints.pop(key, None)
        self._count_restarts(job, outcome.job)
        self.jobs.offer(outcome.job)
        if outcome.job is not job:  # even if the watch was faster and has told of it already
            self._written[key] = time.monotonic()
        self._refusals[key] = outcome.refusals
        if outcome.requeue_after is not None:
            self.queue.add_after(key, outcome.requeue_after.total_seconds())
        return "changed" if outcome.job is not job else "unchanged"

    def _see(self, key: JobKey) -> Seen:
        return Seen(
            pods=self.children.pods(key),
            gone=self.children.gone(key),
            services=self.children.services(key),
            progress=self.progress.newest(key),
            unheard=self.progress.unheard(key),
            refusals=self._refusals.get(key, ()),
            since_write=timedelta(seconds=time.monotonic() - self._written[key]) if key in self._written else None,
        )

    def _count_restarts(self, before: Raw, after: Raw) -> None:
        old, new = before.get("status", {}), after.get("status", {})
        if new.get("restarts", 0) <= old.get("restarts", 0):
            return
        ended: Raw = next((record for record in reversed(new.get("attempts", ())) if record.get("fault")), {})
        self._metrics.restarts.labels(ended.get("reason", ""), ended.get("fault", "")).inc()
