"""Operator process that runs the real manager, controller, informers and leader election on a simulated connection.

This module is imported once per release of the operator, and must not keep state.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, NoReturn

from finetune_operator import names
from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.controller import Controller, LeaseLost
from finetune_operator.controller.job_cache import get_job_key
from finetune_operator.controller.progress_poller import POLL_INTERVAL_SECONDS, ProgressPoller
from finetune_operator.controller.reconcile import PassDependencies
from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.cluster import KubernetesCluster
from finetune_operator.kube.resource_versions import StateRolledBack
from finetune_operator.manager.manager import Connections, Manager, OperatorOptions
from finetune_operator.manager.stable_clock import StableClock
from finetune_operator.metrics import Metrics
from finetune_operator.settings import Settings
from testing.simulator.world import network
from testing.simulator.world.apiserver import RawBody
from testing.simulator.world.operator_connection import OperatorConnection
from testing.simulator.world.pod_network import PodNetwork
from testing.simulator.world.process_pause import ProcessPause, current_process

METRICS = Metrics()  # shared, because one registry per process is slow and its values are not read
EXPECTED_EXITS = (LeaseLost, StateRolledBack)


class ProcessExit(Exception):
    """Raised where the real process exits immediately."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """Everything outside an operator process: connections, clock, options, and the handler of its exit."""

    connection: network.Connection
    pod_network: PodNetwork
    now: Callable[[], datetime]
    on_exit: Callable[[str], None]  # called with the problem, empty if the exit is expected
    trainer_image: str
    version: str
    supervisor: str
    workers: int
    has_leader_election: bool


class SimulatedController(Controller):
    """Controller that attributes requests to the job of their pass, and counts the passes of each job."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pass_counts: dict[str, int] = {}  # by uid of the job

    def use_pod_network(self, pod_network: PodNetwork) -> None:
        """Poll progress over this network, and measure times with the clock of the event loop."""
        clock = asyncio.get_running_loop().time
        self.children._clock = clock
        self.progress_poller = SimulatedPoller(self.jobs, self.children, on_progress=self.enqueue, clock=clock)
        self.progress_poller.pod_network = pod_network

    async def _run_pass(self, key: JobKey) -> None:
        self.pass_counts[key.uid] = self.pass_counts.get(key.uid, 0) + 1
        token = network.acting_job_uid.set(key.uid)
        try:
            await super()._run_pass(key)
        finally:
            network.acting_job_uid.reset(token)


class SimulatedPoller(ProgressPoller):
    """Progress poller whose requests use the network between simulated pods."""

    pod_network: PodNetwork

    async def run(self, *, interval_seconds: float = POLL_INTERVAL_SECONDS) -> None:
        """Poll all jobs every `interval_seconds`, until cancelled."""
        session: Any = self.pod_network
        while True:
            await asyncio.sleep(interval_seconds)
            await self.poll_all(session)


class SimulatedManager(Manager):
    """Manager without kopf, whose watch is simulated, and without metrics and the measurement of delays."""

    def __init__(self, environment: ProcessEnvironment) -> None:
        self._environment = environment
        self.clock_offset = timedelta()
        client = OperatorConnection(environment.connection)
        credentials: Any = SimpleNamespace(namespace="finetune-system", server="")
        settings = Settings(environment.trainer_image, version=environment.version, supervisor=environment.supervisor)
        options = OperatorOptions(
            settings, leader_election=environment.has_leader_election, workers=environment.workers
        )
        super().__init__(options, Connections(credentials, METRICS, client, client))
        if self._election is not None:
            self._election._clock = asyncio.get_running_loop().time

    @property
    def controller(self) -> SimulatedController:
        """The controller of the process."""
        assert isinstance(self._controller, SimulatedController)
        return self._controller

    @property
    def is_leading(self) -> bool:
        """Whether the workers of this process start passes."""
        return bool(self._workers) and (self._election is None or self._election.is_leading)

    def _build_controller(self) -> Controller:
        loop, environment = asyncio.get_running_loop(), self._environment
        clock = StableClock(read_wall=lambda: environment.now() + self.clock_offset, read_monotonic=loop.time)
        client = self._connections.client
        dependencies = PassDependencies(KubernetesCluster(client), self._options.settings, clock.now)
        controller = SimulatedController(client, dependencies, METRICS, namespaces=(None,))
        controller.use_pod_network(environment.pod_network)
        controller.net.keep_running = _run_once  # type: ignore[method-assign, assignment]
        return controller

    async def _wait_for_crd(self) -> None:
        """The simulated API server always serves the resource."""

    async def _start_kopf(self, stop_event: asyncio.Event) -> None:  # noqa: ARG002
        self._kopf = asyncio.create_task(self._watch_jobs())

    async def _watch_jobs(self) -> None:
        """List and watch jobs, and relist after an error, as kopf does; deletions during the gap are missed."""
        path, api = collection_path(names.FINETUNEJOB_KIND, None), self._connections.client
        while not self._kopf_stop_event.is_set():
            try:
                version = ""
                async for page in api.list_pages(path):
                    version = page["metadata"]["resourceVersion"]
                    for body in page["items"]:
                        self._dispatch_event("ADDED", body)
                async for event in api.watch(path, selector="", version=version):
                    self._dispatch_event(event["type"], event["object"])
            except ApiError:
                await asyncio.sleep(1.0)

    def _dispatch_event(self, event_type: str, body: RawBody) -> None:
        if event_type == "DELETED":
            self._controller.on_job_deleted(get_job_key(body))
        else:
            self._controller.on_job_event(body)

    def _register_gauges(self) -> None:
        """Register nothing, because the values are not read."""


class SimulatedOperator:
    """An operator process, which can be crashed, paused and stopped."""

    def __init__(self, environment: ProcessEnvironment) -> None:
        self.connection = environment.connection
        self.is_running = True
        self.process = ProcessPause()
        self._on_exit = environment.on_exit
        self.manager = SimulatedManager(environment)
        self.manager._loop_lag.run = _wait_forever  # type: ignore[method-assign]
        context = copy_context()
        context.run(current_process.set, self.process)
        context.run(network.acting_job_uid.set, "")  # set if the last process crashed in a pass
        self._context = context
        self._task = asyncio.get_running_loop().create_task(self._run(), context=context)

    @property
    def controller(self) -> SimulatedController:
        """The controller of the process."""
        return self.manager.controller

    @property
    def can_act(self) -> bool:
        """Whether the process runs, reaches the API server and leads."""
        is_active = self.is_running and not self.process.is_paused and not self.connection.is_partitioned
        return is_active and self.manager.is_leading

    def crash(self) -> None:
        """Stop the process immediately, even in the middle of an operation."""
        self.is_running = False
        self._task.cancel()
        if self.manager._kopf is not None:
            self.manager._kopf.cancel()
        self.process.resume()

    def stop(self) -> None:
        """Stop the process gracefully, as SIGTERM does."""
        self._shutdown = asyncio.get_running_loop().create_task(self._shut_down(), context=self._context)

    async def _shut_down(self) -> None:
        if self.is_running:
            await self.manager.shut_down()
            self.crash()

    async def _run(self) -> None:
        problem = ""
        try:
            await self.manager.run(asyncio.Event())
        except* (ProcessExit, *EXPECTED_EXITS):
            pass
        except* Exception as errors:
            problem = repr(errors.exceptions)
        if self.is_running:
            self._on_exit(problem)


def exit_immediately() -> NoReturn:
    """Replacement of the function with which the real process exits."""
    raise ProcessExit


async def _wait_forever() -> None:
    await asyncio.get_running_loop().create_future()


async def _run_once(_: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop that ends with its first unexpected error, so that a history with such a bug fails."""
    await run()
