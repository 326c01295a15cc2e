"""Controller that enqueues a job on each watch event and reconciles queued jobs in workers."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache, JobKey, get_owning_job_key
from finetune_operator.controller.create_backoff import CreateBackoff
from finetune_operator.controller.expectations import EXPECTATION_TIMEOUT_SECONDS, Expectations
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.job_cache import JobCache, get_job_key, get_namespaced_name
from finetune_operator.controller.orphans import OrphanSweeper
from finetune_operator.controller.progress_poller import ProgressPoller
from finetune_operator.controller.reconcile import PassDependencies, reconcile, reconcile_degraded, state_missing_rights
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.cluster import ClusterError, Conflict, NotFound, read_job
from finetune_operator.kube.informer import Informer
from finetune_operator.kube.resource_versions import StateRolledBack, check_version_order
from finetune_operator.metrics import Metrics
from finetune_operator.observation.ownership import RawBody
from finetune_operator.observation.pods import RejectedCreate
from finetune_operator.observation.projection import has_ended, project_ended_pod, project_pod, project_service
from finetune_operator.tasks.error_net import ErrorNet
from finetune_operator.tasks.workqueue import QueueClosed, WorkQueue

logger = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Raised by a worker when this replica no longer leads, so that the process ends."""


# Selects any value of the label, so that the watches include every pod that an uncached LIST can return.
LABEL_SELECTOR = names.JOB_UID
TOMBSTONE_PRUNE_INTERVAL_SECONDS = 60.0
DEBOUNCE_SECONDS = 0.02
DEFAULT_WORKERS = 16
JOB_PAGE_SIZE = 50  # of a LIST of jobs, each of which may have more than a MB
DEGRADED_AFTER_ERRORS = 3  # consecutive unexpected errors
Namespaces = tuple[str, ...] | tuple[None]  # (None,) means the whole cluster


class Controller:
    """Holds the state between passes in memory only, because the cluster is the source of truth."""

    def __init__(
        self,
        api: ApiClient,
        dependencies: PassDependencies,
        metrics: Metrics,
        *,
        namespaces: Namespaces,
        workers: int = DEFAULT_WORKERS,
    ) -> None:
        self._api = api
        self._dependencies = dependencies
        self._metrics = metrics
        self._namespaces = namespaces
        self._rejected_creates: dict[JobKey, tuple[RejectedCreate, ...]] = {}
        self._last_errors: dict[JobKey, str] = {}  # error of the last failed pass, removed after a success
        self._unexpected_errors: dict[JobKey, int] = {}  # consecutive passes that raised one
        self._status_written_at: dict[JobKey, float] = {}  # time.monotonic() of the last status write
        self._expectations = Expectations()
        self._backoff = CreateBackoff()
        self._is_leading: Callable[[], bool] = lambda: False
        self.net = ErrorNet(metrics.loop_errors, by_design=(LeaseLost, StateRolledBack))
        self.jobs = JobCache()
        self.queue: WorkQueue[JobKey] = WorkQueue(
            on_wait=metrics.queue_wait.observe,
            get_group=lambda key: key.namespace,
            max_per_group=max(1, workers - 1),  # slow requests in one namespace do not delay the others
        )
        self.children = ChildCache(
            on_change=self.enqueue_debounced,
            current_attempt=self.jobs.current_attempt,
            is_current_pod=self.jobs.is_current_pod,
        )
        self.progress_poller = ProgressPoller(self.jobs, self.children, on_progress=self.enqueue, net=self.net)
        self.orphan_sweeper = OrphanSweeper(
            dependencies.cluster, self.jobs, self.children, now=dependencies.now, net=self.net
        )
        self._pod_informers = {
            namespace: Informer(
                api,
                collection_path("Pod", namespace),
                selector=LABEL_SELECTOR,
                on_change=self._on_pod_event,
                project=self._project_pod,
                net=self.net,
            )
            for namespace in namespaces
        }
        service_informers = (
            Informer(
                api,
                collection_path("Service", namespace),
                selector=LABEL_SELECTOR,
                on_change=self._on_service_event,
                project=project_service,
                net=self.net,
            )
            for namespace in namespaces
        )
        self.informers = (*self._pod_informers.values(), *service_informers)

    @property
    def is_leading(self) -> bool:
        """Whether this replica leads and reconciles jobs."""
        return self._is_leading()

    def now(self) -> datetime:
        """Return the time that passes use."""
        return self._dependencies.now()

    def enqueue(self, key: JobKey) -> None:
        """Enqueue a known job if this replica leads; a standby enqueues all jobs when it starts leading."""
        if key in self.jobs and self._is_leading():
            self.queue.add(key)

    def enqueue_debounced(self, key: JobKey) -> None:
        """Enqueue the job after 20 ms, so that a burst of pod events causes one pass."""
        if key in self.jobs and self._is_leading():
            self.queue.add_after(key, DEBOUNCE_SECONDS)

    def on_job_event(self, body: RawBody) -> None:
        """Store an added or modified job, and enqueue it if it is newer than the cached one."""
        if self._store_job(body):
            self.enqueue(get_job_key(body))

    def on_job_deleted(self, key: JobKey) -> None:
        """Forget a deleted job; the garbage collector deletes its children."""
        self.jobs.remove(key)
        self.queue.remove(key)
        self.children.forget(key)
        self.progress_poller.forget(key)
        self._rejected_creates.pop(key, None)
        self._last_errors.pop(key, None)
        self._unexpected_errors.pop(key, None)
        self._status_written_at.pop(key, None)
        self._expectations.forget(key)
        self._backoff.forget(key)

    async def resync_jobs(self) -> None:
        """Compare the cache with a LIST to find changes that kopf's watch missed, such as deletions between watches.

        Raises:
            ApiError: The jobs could not be listed.
            StateRolledBack: The API server went back to an earlier state.
        """
        for namespace in self._namespaces:
            path = collection_path(names.FINETUNEJOB_KIND, namespace)
            known_version = self.jobs.newest_version()
            listed_keys: set[JobKey] = set()
            version = ""
            async for page in self._api.list_pages(path, page_size=JOB_PAGE_SIZE):
                version = page["metadata"]["resourceVersion"]
                check_version_order(path, known_version=known_version, current_version=version)
                for body in page["items"]:
                    self.jobs.check_listed_version(body, list_version=version)
                    listed_keys.add(get_job_key(body))
                    try:
                        self.on_job_event(body)
                    except Exception as error:  # an unforeseen job must not stop the others
                        self.net.record("resync", error, about=get_namespaced_name(body))
            for key in self.jobs.find_missing_jobs(listed_keys, list_version=version):
                if namespace in (None, key.namespace):
                    self.on_job_deleted(key)

    async def prune_tombstones(self) -> None:
        """Drop expired tombstones once a minute, until cancelled."""

        async def prune() -> None:
            self.children.prune()

        await self.net.repeat("pruning of tombstones", prune, lambda: TOMBSTONE_PRUNE_INTERVAL_SECONDS)

    def start_leading(self, is_leading: Callable[[], bool]) -> None:
        """Enqueue all jobs, and process the queue as long as `is_leading` returns True."""
        self._is_leading = is_leading
        for key in self.jobs:
            self.queue.add(key)

    async def run_worker(self) -> None:
        """Reconcile queued jobs one at a time until the queue is closed.

        Raises: LeaseLost if this replica no longer leads.
        """
        try:
            while True:
                async with self.queue.next() as key:
                    if not self._is_leading():
                        raise LeaseLost("the lease expired; this process starts no more passes")
                    try:
                        await self._run_pass(key)
                    except Exception as error:  # _run_pass handles those of the pass itself
                        self.net.record("workers", error, about=f"{key.namespace}/{key.uid}")
                        self.queue.retry(key)
        except QueueClosed:
            return

    async def _run_pass(self, key: JobKey) -> None:
        job = self.jobs.get(key)
        if job is None:
            self.queue.remove(key)
            return
        started_at = time.monotonic()
        result = "error"
        try:
            result = await self._reconcile(key, job)
            self._unexpected_errors.pop(key, None)
        except ClusterError as error:
            result = type(error).__name__
            delay = self.queue.retry(key, min_delay_seconds=error.retry_after or 0.0)
            is_expected = isinstance(error, Conflict) or self._last_errors.get(key) == str(error)
            self._last_errors[key] = str(error)
            logger.log(
                logging.DEBUG if is_expected else logging.WARNING,
                "pass failed, will be retried: %s",
                error,
                extra={"job": get_namespaced_name(job), "retry_seconds": round(delay, 3)},
            )
            await self._state_missing_rights(key)
        except Exception as error:  # the outermost loop: a bug in the pass of one job must not stop the others
            delay = self.queue.retry(key)
            fields = {"job": get_namespaced_name(job), "retry_seconds": round(delay, 3)}
            logger.exception("pass failed with an unexpected error, will be retried", extra=fields)
            self._unexpected_errors[key] = self._unexpected_errors.get(key, 0) + 1
            if self._unexpected_errors[key] >= DEGRADED_AFTER_ERRORS:
                await self._reconcile_degraded(key, job, error)
        finally:
            self._metrics.reconcile.labels(result).observe(time.monotonic() - started_at)

    async def _reconcile(self, key: JobKey, job: RawBody) -> str:
        """Run one pass, store its result, and return the `result` label of the metric."""
        try:
            # the failed write may have taken effect although its response was lost (decisions/108)
            if key in self._last_errors:
                job = await read_job(self._api, job)
            result = await reconcile(self._dependencies, job, self._cached_state(key))
        except NotFound:
            self.on_job_deleted(key)
            return "gone"
        if key not in self.jobs:  # do not store a job again that was deleted during the pass
            return "gone"
        self.queue.reset_backoff(key)
        self._last_errors.pop(key, None)
        self._count_restarts(job, result.job)
        self._store_job(result.job)
        if result.job is not job:  # this pass wrote the status, even if the watch delivered it earlier
            self._status_written_at[key] = time.monotonic()
        self._rejected_creates[key] = result.rejected_creates
        if result.has_tried_creates:
            self._backoff.record(key, result.rejected_creates)
            if delay := self._backoff.remaining_seconds(key):
                self.queue.add_after(key, delay)
        if self._expectations.record(key, result.actions, result.pod_uids):
            self.queue.add_after(key, EXPECTATION_TIMEOUT_SECONDS)
        if self.jobs.is_finished(key):
            self._expectations.forget_created_pods(key)
            self._backoff.forget(key)
        if result.requeue_after is not None:
            self.queue.add_after(key, result.requeue_after.total_seconds())
        return "changed" if result.job is not job else "unchanged"

    async def _state_missing_rights(self, key: JobKey) -> None:
        """State in the status of a job whose pass failed which rights the operator lacks."""
        rights, job = self._api.missing_rights.list(key.namespace), self.jobs.get(key)
        if not rights or job is None:
            return
        with suppress(ClusterError):  # the cached job is used if this read is what the operator has no permission for
            job = await read_job(self._api, job)  # the failed pass may have written the status
        with suppress(ClusterError):  # the next pass tries again
            self._store_job((await state_missing_rights(self._dependencies, job, rights)).job)

    async def _reconcile_degraded(self, key: JobKey, job: RawBody, error: Exception) -> None:
        """Apply suspend, deadlines and TTL to a job whose passes fail repeatedly for an unforeseen reason."""
        problem = f"{type(error).__name__}: {error}"
        try:
            job = await read_job(self._api, job)
            result = await reconcile_degraded(self._dependencies, job, self._cached_state(key), problem=problem)
            self._store_job(result.job)
        except NotFound:
            self.on_job_deleted(key)
        except Exception:  # as in _run_pass
            logger.exception("degraded pass failed", extra={"job": get_namespaced_name(job)})

    def _store_job(self, body: RawBody) -> bool:
        """Store a job if it is newer than the cached one. Of the pods of a finished job, only identities are kept."""
        is_newer, key = self.jobs.store_if_newer(body), get_job_key(body)
        if is_newer and self.jobs.is_finished(key):
            informer = self._pod_informers.get(key.namespace) or self._pod_informers.get(None)
            for pod in self.children.reduce_ended_pods(key):
                if informer is not None:
                    informer.replace(pod)
        return is_newer

    def _on_pod_event(self, old_pod: RawBody | None, new_pod: RawBody | None) -> None:
        self.children.on_pod_event(old_pod, new_pod)
        if has_ended(new_pod) and not has_ended(old_pod):
            self._retry_creates(old_pod or new_pod)

    def _on_service_event(self, old_service: RawBody | None, new_service: RawBody | None) -> None:
        self.children.on_service_event(old_service, new_service)
        if new_service is None:
            self._retry_creates(old_service)

    def _retry_creates(self, removed: RawBody | None) -> None:
        """Let the jobs of a namespace retry rejected creates, because an object there no longer uses its quota."""
        for key in self._backoff.wake(removed["metadata"]["namespace"]) if removed else ():
            self.enqueue(key)

    def _project_pod(self, pod: RawBody) -> RawBody:
        key = get_owning_job_key(pod)
        is_finished = key is not None and self.jobs.is_finished(key)
        return (project_ended_pod(pod) if is_finished else None) or project_pod(pod)

    def _cached_state(self, key: JobKey) -> CachedState:
        written_at = self._status_written_at.get(key)
        return CachedState(
            pods=self.children.pods(key),
            deleted_pods=self.children.deleted_pods(key),
            services=self.children.services(key),
            progress=self.progress_poller.get_latest_progress(key),
            degradations=self.progress_poller.get_degradations(key),
            unreachable_endpoint=self.progress_poller.get_unreachable_endpoint(key),
            rejected_creates=self._rejected_creates.get(key, ()),
            last_rejection=self._backoff.get_last_rejection(key),
            missing_rights=self._api.missing_rights.list(key.namespace),
            create_delay=timedelta(seconds=self._backoff.remaining_seconds(key)),
            time_since_status_write=None if written_at is None else timedelta(seconds=time.monotonic() - written_at),
            expected_pods=self._expectations.list_created(key, "Pod"),
            expected_services=self._expectations.list_created(key, "Service"),
            created_pods=self._expectations.list_created_pods(key),
            sent_deletions=self._expectations.list_deletions(key),
        )

    def _count_restarts(self, old_job: RawBody, new_job: RawBody) -> None:
        old_status, new_status = old_job.get("status", {}), new_job.get("status", {})
        if new_status.get("restarts", 0) <= old_status.get("restarts", 0):
            return
        attempts = reversed(new_status.get("attempts", ()))
        failed_attempt: RawBody = next((record for record in attempts if record.get("fault")), {})
        namespace, reason, fault = (
            new_job["metadata"]["namespace"],
            failed_attempt.get("reason", ""),
            failed_attempt.get("fault", ""),
        )
        self._metrics.restarts.labels(namespace, reason, fault).inc()
