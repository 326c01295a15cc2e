"""Runs the operator process, from filling the caches to the graceful shutdown."""

import asyncio
import logging
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NoReturn
from uuid import uuid4

from finetune_operator import names
from finetune_operator.controller.controller import DEFAULT_WORKERS, Controller
from finetune_operator.controller.job_metrics import JobMetrics
from finetune_operator.controller.reconcile import PassDependencies
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import build_path
from finetune_operator.kube.cluster import KubernetesCluster
from finetune_operator.kube.credentials import ClusterCredentials, find_credentials, open_session
from finetune_operator.manager.health import (
    EventLoopLag,
    Health,
    LastRequestTime,
    build_duration_check,
    start_http_server,
)
from finetune_operator.manager.kopf_watch import WATCH_SECONDS, KopfOptions, handle_loop_error, run_kopf, start_kopf
from finetune_operator.manager.leader_election import LeaderElection, LeaseConfig
from finetune_operator.manager.stable_clock import StableClock
from finetune_operator.metrics import Metrics, RequestCounter
from finetune_operator.notifications.notifier import Notifier
from finetune_operator.notifications.sink import SinkConfig
from finetune_operator.settings import Settings
from finetune_operator.tasks.error_net import FAILURE_LIMIT_SECONDS, ErrorNet

logger = logging.getLogger(__name__)

RESYNC_INTERVAL_SECONDS = 600.0
RETRY_INTERVAL_SECONDS = 5.0
DRAIN_TIMEOUT_SECONDS = 10.0

WATCH_SILENCE_LIMIT_SECONDS = 180.0  # the API server sends a bookmark every 60 s, and the client times out after 90 s
JOB_WATCH_SILENCE_LIMIT_SECONDS = WATCH_SECONDS + 120.0  # kopf only exposes when a watch starts, not its bookmarks
PASS_DURATION_LIMIT_SECONDS = 300.0
LOOP_LAG_LIMIT_SECONDS = 10.0


@dataclass(frozen=True)
class OperatorOptions:
    """Options of the operator process, set by flags and environment variables."""

    settings: Settings
    namespaces: tuple[str, ...] = ()  # empty to watch all namespaces
    kubeconfig: str | None = None
    context: str | None = None
    metrics_port: int = 8080
    leader_election: bool = True
    lease_name: str = names.MANAGER
    workers: int = DEFAULT_WORKERS
    sink: SinkConfig | None = None  # None sends no notifications
    max_job_metrics: int = 1000  # jobs with metrics of their own


@dataclass(frozen=True)
class Connections:
    """Connections to the API server; watches and the lease have their own, so that requests do not delay them."""

    credentials: ClusterCredentials
    metrics: Metrics
    client: ApiClient
    lease_client: ApiClient


async def run_operator(options: OperatorOptions) -> None:
    """Run the operator until SIGTERM or SIGINT; raise errors that require a restart of the process."""
    stop_event = asyncio.Event()
    stop_on_signals(stop_event)
    asyncio.get_running_loop().set_exception_handler(handle_loop_error)
    credentials = find_credentials(kubeconfig=options.kubeconfig, context=options.context)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        middlewares = (RequestCounter(metrics.requests),)
        request_session = await stack.enter_async_context(
            open_session(credentials, connections=0, middlewares=middlewares)
        )
        watch_session = await stack.enter_async_context(
            open_session(credentials, connections=0, middlewares=middlewares)
        )
        connections = Connections(
            credentials=credentials,
            metrics=metrics,
            client=ApiClient(credentials.server, request_session=request_session, watch_session=watch_session),
            lease_client=ApiClient(credentials.server, request_session=watch_session, watch_session=watch_session),
        )
        manager = Manager(options, connections)
        http_server = await start_http_server(manager.health, metrics, port=options.metrics_port)
        stack.push_async_callback(http_server.cleanup)
        await _run_until_stopped(stop_event, manager)


async def _run_until_stopped(stop_event: asyncio.Event, manager: "Manager") -> None:
    run_task = asyncio.create_task(manager.run(stop_event))
    stop_task = asyncio.create_task(stop_event.wait())
    # Wait for a signal or a failure.
    await asyncio.wait((run_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
    logger.info("stopping")
    # Drain the workers and release the lease.
    await manager.shut_down()
    # Stop the remaining tasks, but stop kopf last, because kopf cancels all tasks that started after it.
    has_failed = run_task.done()
    run_task.cancel()
    await asyncio.wait((run_task,))
    await manager.stop_kopf()
    if has_failed:
        run_task.result()


class Manager:
    """Starts and stops the components of the operator process in order."""

    def __init__(self, options: OperatorOptions, connections: Connections) -> None:
        self._options = options
        self._connections = connections
        self._metrics = connections.metrics
        self._clock = StableClock()
        net = ErrorNet(self._metrics.loop_errors)
        self._notifier = (
            Notifier(options.sink, self._metrics.notifications, now=self._clock.now, net=net) if options.sink else None
        )
        self._controller = self._build_controller()
        self._election = _build_election(options, connections) if options.leader_election else None
        self._loop_lag = EventLoopLag(self._metrics)
        self._last_kopf_request = LastRequestTime()
        self._kopf_stop_event = asyncio.Event()
        self._kopf: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._is_started = False
        self.health = Health()
        self._add_checks()
        self._register_gauges()

    async def run(self, stop_event: asyncio.Event) -> None:
        """Start all components in order, and keep them running until cancelled or until one of them fails."""
        keep_running = self._controller.net.keep_running
        async with asyncio.TaskGroup() as group:
            # Start the informers of pods and services, and wait until their caches are filled.
            group.create_task(keep_running("event loop", self._loop_lag.run))
            for informer in self._controller.informers:
                group.create_task(keep_running(f"watch of {informer.path}", informer.run))
            await keep_running("start", self._wait_for_crd)
            for informer in self._controller.informers:
                await informer.synced.wait()
            # List the jobs, then watch them.
            await keep_running("resync", self._resync_with_retries)
            await self._start_kopf(stop_event)
            group.create_task(self._watch_kopf())
            group.create_task(keep_running("pruning of tombstones", self._controller.prune_tombstones))
            self._is_started = True
            logger.info("watching", extra={"jobs": len(self._controller.jobs)})
            # Wait for the lease, then reconcile.
            await self._run_as_leader(group)

    async def shut_down(self) -> None:
        """Stop starting passes, wait for the running passes, and release the lease."""
        self._controller.queue.close()
        if self._workers:
            _, pending = await asyncio.wait(self._workers, timeout=DRAIN_TIMEOUT_SECONDS)
            for worker in pending:
                worker.cancel()
        if self._election is not None:
            await self._election.release()

    async def stop_kopf(self) -> None:
        """Stop kopf. Must be called last, because kopf cancels all tasks that started after it."""
        if self._kopf is not None:
            self._kopf_stop_event.set()
            await asyncio.wait((self._kopf,), timeout=DRAIN_TIMEOUT_SECONDS)

    def _build_controller(self) -> Controller:
        client, options = self._connections.client, self._options
        report_status = self._notifier.report if self._notifier else None
        dependencies = PassDependencies(KubernetesCluster(client), options.settings, self._clock.now, report_status)
        namespaces = options.namespaces or (None,)
        return Controller(client, dependencies, self._metrics, namespaces=namespaces, workers=options.workers)

    async def _run_as_leader(self, group: asyncio.TaskGroup) -> None:
        keep_running = self._controller.net.keep_running
        if self._election is None:
            self._controller.start_leading(lambda: True)
        else:
            await keep_running("lease", self._election.acquire)
            election = self._election
            self._controller.start_leading(lambda: election.is_leading)
        # List the jobs again, because a standby only watches them.
        group.create_task(keep_running("resync", self._resync_periodically))
        logger.info("leading")
        self._metrics.leader.set(1)
        workers = (keep_running("workers", self._controller.run_worker) for _ in range(self._options.workers))
        self._workers = [group.create_task(worker) for worker in workers]
        group.create_task(keep_running("polls", self._controller.progress_poller.run))
        group.create_task(keep_running("sweeps", self._controller.orphan_sweeper.run))
        if self._notifier is not None:
            group.create_task(keep_running("notifications", self._notifier.run))
        if self._election is not None:
            await keep_running("lease", self._election.renew_until_lost)
            if not self._controller.queue.closed:
                exit_immediately()

    async def _start_kopf(self, stop_event: asyncio.Event) -> None:
        credentials, metrics = self._connections.credentials, self._metrics
        middlewares = (RequestCounter(metrics.requests), self._last_kopf_request)
        kopf_options = KopfOptions(
            server=credentials.server,
            open_session=lambda: open_session(credentials, connections=0, middlewares=middlewares),
            namespaces=self._options.namespaces,
        )
        tasks = await start_kopf(self._controller, kopf_options, stop_event=self._kopf_stop_event)
        stop_on_signals(stop_event)  # kopf has replaced the signal handlers
        self._kopf = asyncio.create_task(run_kopf(tasks))
        check = build_duration_check(
            JOB_WATCH_SILENCE_LIMIT_SECONDS, self._last_kopf_request.seconds_since_request, "no request"
        )
        self.health.add_liveness_check("watch of finetunejobs", check)

    async def _watch_kopf(self) -> None:
        """Fail the task group if kopf fails, but do not cancel kopf together with the group."""
        if self._kopf is not None:
            await asyncio.shield(self._kopf)

    async def _wait_for_crd(self) -> None:
        """Wait until the CRD is installed, because kopf does not watch a resource without a CRD."""
        while True:
            try:
                api_group = await self._connections.client.call("GET", build_path(names.API_VERSION))
                if any(resource["name"] == names.FINETUNEJOB[2] for resource in api_group.get("resources", ())):
                    return
                problem = "not among its resources"
            except ApiError as error:
                problem = error.message
            crd_name = f"{names.FINETUNEJOB[2]}.{names.FINETUNEJOB[0]}"
            logger.warning("the API server does not serve %s (%s); is the CRD installed?", crd_name, problem)
            await asyncio.sleep(RETRY_INTERVAL_SECONDS)

    async def _resync_with_retries(self) -> None:
        while True:
            try:
                return await self._controller.resync_jobs()
            except ApiError as error:
                logger.warning("jobs not listed: %s", error.message)
            await asyncio.sleep(RETRY_INTERVAL_SECONDS)

    async def _resync_periodically(self) -> None:
        delays = chain((0.0,), repeat(RESYNC_INTERVAL_SECONDS))
        await self._controller.net.repeat("resync", self._resync_with_retries, lambda: next(delays))

    def _add_checks(self) -> None:
        for informer in self._controller.informers:
            check = build_duration_check(WATCH_SILENCE_LIMIT_SECONDS, informer.seconds_since_activity, "no activity")
            self.health.add_liveness_check(f"watch of {informer.path}", check)
        limit, queue = PASS_DURATION_LIMIT_SECONDS, self._controller.queue
        check = build_duration_check(limit, queue.longest_pass_seconds, "one pass has been running")
        self.health.add_liveness_check("passes", check)
        check = build_duration_check(limit, queue.stalled_seconds, "jobs were queued, but no pass started")
        self.health.add_liveness_check("queue", check)
        self.health.add_liveness_check(
            "event loop", build_duration_check(LOOP_LAG_LIMIT_SECONDS, lambda: self._loop_lag.worst_seconds, "was late")
        )
        net = self._controller.net
        check = build_duration_check(FAILURE_LIMIT_SECONDS, net.longest_failure_seconds, "a background loop has failed")
        self.health.add_liveness_check("background loops", check)
        self.health.add_readiness_check(
            "start", lambda: None if self._is_started else "the first lists are not complete"
        )

    def _register_gauges(self) -> None:
        queue, jobs, informers = self._controller.queue, self._controller.jobs, self._controller.informers
        register_gauge = self._metrics.register_gauge
        register_gauge("finetune_queue_depth", "Jobs in the work queue.", read_values=lambda: {"": len(queue)})
        register_gauge(
            "finetune_queue_oldest_seconds",
            "Wait time of the oldest job in the work queue.",
            read_values=lambda: {"": queue.oldest_wait_seconds()},
        )
        if notifier := self._notifier:
            register_gauge(
                "finetune_notification_queue",
                "Notifications that wait for their delivery.",
                read_values=lambda: {"": notifier.queued_count},
            )
        register_gauge("finetune_jobs", "Jobs by phase.", label="phase", read_values=jobs.count_phases)
        register_gauge(
            "finetune_watch_age_seconds",
            "Time since the last data of a watch; for the watch of jobs, since its last request.",
            label="collection",
            read_values=lambda: {
                **{informer.path: time.monotonic() - informer.last_contact for informer in informers},
                names.FINETUNEJOB[2]: self._last_kopf_request.seconds_since_request(),
            },
        )
        job_metrics = JobMetrics(
            self._controller.jobs,
            is_leading=lambda: self._controller.is_leading,
            now=self._controller.now,
            max_jobs=self._options.max_job_metrics,
        )
        self._metrics.registry.register(job_metrics)


def _build_election(options: OperatorOptions, connections: Connections) -> LeaderElection:
    identity = f"{os.uname().nodename}_{uuid4()}"
    lease = LeaseConfig(connections.credentials.namespace, options.lease_name, identity)
    return LeaderElection(connections.lease_client, lease)


def stop_on_signals(stop_event: asyncio.Event) -> None:
    """Set the event on SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_event.set)


def exit_immediately() -> NoReturn:
    """Exit without waiting for requests in flight, because another replica may be leading already."""
    logger.critical("no longer the leader; exiting")
    logging.shutdown()
    os._exit(1)
