"""One process of the operator: watch first, then wait for the lease, then act, and leave tidily."""

import asyncio
import logging
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn
from uuid import uuid4

from finetune_operator import names
from finetune_operator.controller.controller import Controller
from finetune_operator.controller.reconcile import Pass
from finetune_operator.kube.api_client import ApiError, ApiServer
from finetune_operator.kube.cluster import KubernetesCluster
from finetune_operator.kube.credentials import Access, find_access, open_session
from finetune_operator.manager.health import Health, LastContact, LoopLag, not_longer_than, serve
from finetune_operator.manager.kopf_watch import WATCH_SECONDS, Host, run_kopf, start_kopf
from finetune_operator.manager.leader_election import LeaderElection, LeaseName
from finetune_operator.metrics import CountRequests, Metrics
from finetune_operator.plan.run_plan import Settings

logger = logging.getLogger(__name__)

CONNECTIONS = 32  # for calls; asyncio keeps 256 KiB per TLS connection, and more of them only wait in the API server
LIST_JOBS_SECONDS = 600.0
TRY_AGAIN_SECONDS = 5.0
DRAIN_SECONDS = 10.0

SILENT_WATCH = 180.0  # seconds; a bookmark is due every 60, and the client gives up after 90
SILENT_JOBS_WATCH = WATCH_SECONDS + 120.0  # kopf shows us where a watch begins, not its bookmarks
STUCK_PASS = 300.0
LATE_LOOP = 10.0


@dataclass(frozen=True)
class Options:
    """What a person can set."""

    settings: Settings
    namespaces: tuple[str, ...] = ()  # empty: the whole cluster
    kubeconfig: str | None = None
    context: str | None = None
    metrics_port: int = 8080
    leader_election: bool = True
    lease_name: str = names.MANAGER
    workers: int = 16


@dataclass(frozen=True)
class Connections:
    """The ways to the API server. Watches and the lease do not queue behind calls."""

    access: Access
    metrics: Metrics
    calls: ApiServer
    lease: ApiServer


async def operate(options: Options) -> None:
    """Run until SIGTERM or SIGINT; raises if something fails that only a new process can mend."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    access = find_access(kubeconfig=options.kubeconfig, context=options.context)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        count = (CountRequests(metrics.requests),)
        calls = await stack.enter_async_context(open_session(access, connections=CONNECTIONS, middlewares=count))
        streams = await stack.enter_async_context(open_session(access, connections=0, middlewares=count))
        connections = Connections(
            access=access,
            metrics=metrics,
            calls=ApiServer(access.server, calls=calls, streams=streams),
            lease=ApiServer(access.server, calls=streams, streams=streams),
        )
        replica = Replica(options, connections)
        stack.push_async_callback((await serve(replica.health, metrics, port=options.metrics_port)).cleanup)
        await _run_until(stop, replica)


async def _run_until(stop: asyncio.Event, replica: "Replica") -> None:
    running = asyncio.create_task(replica.run(stop))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    logger.info("stopping")
    await replica.leave()
    failed = running.done()
    running.cancel()
    await asyncio.wait((running,))
    await replica.end_kopf()
    if failed:
        running.result()


class Replica:
    """The parts of one process and the order in which they start and stop."""

    def __init__(self, options: Options, connections: Connections) -> None:
        self._options = options
        self._connections = connections
        self._metrics = connections.metrics
        cluster = KubernetesCluster(connections.calls)
        self._controller = Controller(
            connections.calls,
            Pass(cluster, options.settings, lambda: datetime.now(UTC)),
            self._metrics,
            namespaces=options.namespaces or (None,),
        )
        self._election = _election(options, connections) if options.leader_election else None
        self._lag = LoopLag(self._metrics)
        self._kopf_contact = LastContact()
        self._kopf_stop = asyncio.Event()
        self._kopf: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._started = False
        self.health = Health()
        self._add_checks()
        self._add_gauges()

    async def run(self, stop: asyncio.Event) -> None:
        """Start everything in order and keep it running; ends only by being cancelled or by failing."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lag.run())
            for informer in self._controller.informers:
                group.create_task(informer.run())
            await self._wait_until_served()
            for informer in self._controller.informers:
                await informer.synced.wait()
            await self._list_jobs_at_first()
            await self._start_kopf(stop)
            group.create_task(self._watch_kopf())
            group.create_task(self._keep_listing_jobs())
            group.create_task(self._controller.sweep())
            self._started = True
            logger.info("watching", extra={"jobs": len(self._controller.jobs)})
            await self._lead(group)

    async def leave(self) -> None:
        """Finish the passes that run, begin none, and let another replica take over."""
        self._controller.queue.close()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=DRAIN_SECONDS)
            for worker in late:
                worker.cancel()
        if self._election is not None:
            await self._election.release()

    async def end_kopf(self) -> None:
        """Last, because kopf cancels every task that it did not know at its start."""
        if self._kopf is not None:
            self._kopf_stop.set()
            await asyncio.wait((self._kopf,), timeout=DRAIN_SECONDS)

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        if self._election is None:
            self._controller.lead(lambda: True)
        else:
            await self._election.acquire()
            election = self._election
            self._controller.lead(lambda: election.leading)
        logger.info("leading")
        self._metrics.leader.set(1)
        self._workers = [group.create_task(self._controller.work()) for _ in range(self._options.workers)]
        group.create_task(self._controller.progress.run())
        if self._election is not None:
            await self._election.hold()
            if not self._controller.queue.closed:
                exit_at_once()

    async def _start_kopf(self, stop: asyncio.Event) -> None:
        access, metrics = self._connections.access, self._metrics
        middlewares = (CountRequests(metrics.requests), self._kopf_contact)
        host = Host(
            server=access.server,
            open_session=lambda: open_session(access, connections=0, middlewares=middlewares),
            namespaces=self._options.namespaces,
        )
        tasks = await start_kopf(self._controller, host, stop=self._kopf_stop)
        stop_on_signals(stop)  # kopf has just taken them
        self._kopf = asyncio.create_task(run_kopf(tasks))
        limit = not_longer_than(SILENT_JOBS_WATCH, self._kopf_contact.age_seconds, "no request")
        self.health.alive_if("watch of finetunejobs", limit)

    async def _watch_kopf(self) -> None:
        """Outside of the group kopf outlives its cancellation; its failure ends the group all the same."""
        if self._kopf is not None:
            await asyncio.shield(self._kopf)

    async def _wait_until_served(self) -> None:
        """Without the CRD kopf would watch nothing, and say so once."""
        while True:
            try:
                served = await self._connections.calls.call("GET", f"/apis/{names.API_VERSION}")
                if any(resource["name"] == names.FINETUNEJOB[2] for resource in served.get("resources", ())):
                    return
                problem = "not among its resources"
            except ApiError as error:
                problem = error.message
            what = f"{names.FINETUNEJOB[2]}.{names.FINETUNEJOB[0]}"
            logger.warning("the API server does not serve %s (%s); is the CRD installed?", what, problem)
            await asyncio.sleep(TRY_AGAIN_SECONDS)

    async def _list_jobs_at_first(self) -> None:
        while True:
            try:
                return await self._controller.list_jobs()
            except ApiError as error:
                logger.warning("jobs not listed: %s", error.message)
            await asyncio.sleep(TRY_AGAIN_SECONDS)

    async def _keep_listing_jobs(self) -> None:
        while True:
            await asyncio.sleep(LIST_JOBS_SECONDS)
            await self._list_jobs_at_first()

    def _add_checks(self) -> None:
        for informer in self._controller.informers:
            age = not_longer_than(SILENT_WATCH, informer.silent_seconds, "no sign of life")
            self.health.alive_if(f"watch of {informer.path}", age)
        longest_pass = self._controller.queue.longest_pass_seconds
        self.health.alive_if("passes", not_longer_than(STUCK_PASS, longest_pass, "one pass has been running"))
        self.health.alive_if("event loop", not_longer_than(LATE_LOOP, lambda: self._lag.worst_seconds, "was late"))
        self.health.ready_if("start", lambda: None if self._started else "the first lists are not complete")

    def _add_gauges(self) -> None:
        queue, jobs, informers = self._controller.queue, self._controller.jobs, self._controller.informers
        scrape = self._metrics.scrape
        scrape("finetune_queue_depth", "Jobs that wait for a pass.", read=lambda: {"": len(queue)})
        scrape(
            "finetune_queue_oldest_seconds",
            "How long the first in line has waited.",
            read=lambda: {"": queue.oldest_wait_seconds()},
        )
        scrape("finetune_jobs", "Jobs by phase.", label="phase", read=jobs.count_phases)
        scrape(
            "finetune_watch_age_seconds",
            "Time since the last line of a watch; the watch of jobs shows its beginnings only.",
            label="collection",
            read=lambda: {
                **{informer.path: time.monotonic() - informer.last_contact for informer in informers},
                names.FINETUNEJOB[2]: self._kopf_contact.age_seconds(),
            },
        )


def _election(options: Options, connections: Connections) -> LeaderElection:
    identity = f"{os.uname().nodename}_{uuid4()}"
    lease = LeaseName(connections.access.namespace, options.lease_name, identity)
    return LeaderElection(connections.lease, lease)


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set the event."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def exit_at_once() -> NoReturn:
    """Another replica may act from now on: not even a request under way is waited for."""
    logger.critical("no longer the leader; exiting")
    logging.shutdown()
    os._exit(1)
