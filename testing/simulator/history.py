"""Runs one simulated history, in which faults are injected into a job and its cluster."""

import asyncio
import functools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from unittest import mock

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.controller.controller import logger as controller_log
from testing.fakes.virtual_time import VirtualTimeLoop
from testing.simulator.incidents.job_incidents import Incident
from testing.simulator.invariants import InvariantMonitor
from testing.simulator.world.apiserver import Change
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS, NetworkFaults
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import SPARE_K8S_NODES, ErrorLog, World

HORIZON_SECONDS = 3600.0
SETTLING_SECONDS = 400.0  # longer than any grace period or toleration
TICK_SECONDS = 10.0
MAX_COMMITS = 5000


@dataclass(frozen=True)
class Trigger:
    """Time of a fault: `seconds` after the commit with this number, or after the start if the number is 0."""

    seconds: float
    commit_number: int = 0


TWO_NODES = Workload(num_nodes=2)


class Liveness(StrEnum):
    """Liveness property of a history, that is, the outcome that the job must reach despite all faults."""

    ENDS = "ends, or reports what it waits for"
    COMPLETES = "completes, or reports what it waits for"
    COMPLETES_UNDISTURBED = "completes in the first attempt"


@dataclass(frozen=True)
class Scenario:
    """Faults and settings of a history, drawn before it starts; all other choices are drawn while it runs."""

    workload: Workload = TWO_NODES
    spec_fields: dict[str, Any] = field(default_factory=dict)
    network_faults: NetworkFaults = NO_FAULTS
    incidents: tuple[tuple[Trigger, Incident], ...] = ()
    # start of each new leader, and seconds for which the previous leader continues to act
    takeovers: tuple[tuple[Trigger, float], ...] = ()
    liveness: Liveness = Liveness.ENDS
    is_resumed_at_end: bool = True
    faults_end_seconds: float = 60.0


@dataclass(frozen=True)
class HistoryResult:
    """Violated invariants and final state of a history."""

    violations: list[str]
    trace: list[str]
    phase: str
    restarts: int
    commits: int
    failure_reasons: tuple[str, ...] = ()  # of the failed attempts


def run_history(scenario: Scenario, choices: Choices) -> HistoryResult:
    """Run a history in virtual time."""
    random.seed(choices.draw_number(1000))  # the operator adds jitter to its backoff
    with (
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
        mock.patch("time.monotonic", runner.get_loop().time),
    ):
        return runner.run(_run_history(scenario, choices))


def _report_task_error(monitor: InvariantMonitor, context: dict[str, Any]) -> None:
    """Report an exception of a background task.

    The error that Python raises when it closes a stream of a killed process is ignored.
    """
    if "asynchronous generator is already running" not in str(context.get("exception")):
        monitor.report(f"a task failed: {context}")


async def _run_history(scenario: Scenario, choices: Choices) -> HistoryResult:
    world = World(choices, scenario.workload, network_faults=scenario.network_faults, **scenario.spec_fields)
    world.has_split_brain = bool(scenario.takeovers)
    monitor = InvariantMonitor(world, has_split_brain=world.has_split_brain)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _report_task_error(monitor, context))
    errors = ErrorLog(monitor.report)
    controller_log.addHandler(errors)
    try:
        await _run_phases(world, monitor, scenario)
        monitor.check_output()
        if not monitor.violations:
            _check_liveness(world, monitor, scenario.liveness)
    finally:
        controller_log.removeHandler(errors)
    return HistoryResult(
        violations=monitor.violations,
        trace=world.trace,
        phase=world.status.get("phase", "Deleted"),
        restarts=world.status.get("restarts", 0),
        commits=len(world.server.history),
        failure_reasons=tuple(
            record["reason"] for record in world.status.get("attempts", ()) if record["state"] == AttemptState.FAILED
        ),
    )


async def _run_phases(world: World, monitor: InvariantMonitor, scenario: Scenario) -> None:
    # start the operator and schedule the faults
    world.start_operator()
    for trigger, overlap in scenario.takeovers:
        _schedule_fault(world, trigger, functools.partial(world.take_over, overlap))
    for trigger, incident in scenario.incidents:
        _schedule_fault(world, trigger, functools.partial(_inject, world, incident))
    # inject the faults, then stop and repair the temporary ones
    await _advance(world, monitor, is_done=None, limit_seconds=scenario.faults_end_seconds)
    world.end_faults()
    _recover_k8s_nodes(world, scenario)
    if scenario.is_resumed_at_end:
        world.edit_spec(suspend=False)
    # the job must finish, or report a valid reason to wait
    is_ended = await _advance(world, monitor, is_done=world.is_finished, limit_seconds=HORIZON_SECONDS)
    if monitor.violations:
        return
    if not is_ended:
        if not _is_waiting_legitimately(world):
            monitor.report(f"no end: {world.status.get('phase')} {world.status.get('conditions')}")
        return
    # after the job has finished, nothing may change
    await _advance(world, monitor, is_done=None, limit_seconds=SETTLING_SECONDS)
    await _check_settled(world, monitor)


def _schedule_fault(world: World, trigger: Trigger, inject: Callable[[], None]) -> None:
    """Schedule a fault, which is skipped if it becomes due after fault injection has ended."""

    def start() -> None:
        asyncio.get_running_loop().call_later(trigger.seconds, lambda: None if world.faults_ended else inject())

    def start_at_commit(change: Change) -> None:
        if len(world.server.history) == trigger.commit_number:
            start()

    if trigger.commit_number:
        world.server.listeners.append(start_at_commit)
    else:
        start()


def _inject(world: World, incident: Incident) -> None:
    world.add_trace(f"incident: {incident.__name__}")
    incident(world)


def _recover_k8s_nodes(world: World, scenario: Scenario) -> None:
    """Recover all Kubernetes nodes except the spare ones, so that the job does not stay pending forever."""
    disconnected = [k8s_node for k8s_node in world.k8s_nodes.nodes if not k8s_node.connected.is_set()]
    for k8s_node in disconnected[SPARE_K8S_NODES:]:
        world.node_controllers.recover(k8s_node)


async def _advance(
    world: World, monitor: InvariantMonitor, *, is_done: Callable[[], bool] | None, limit_seconds: float
) -> bool:
    """Run until `is_done` returns True, an invariant is violated or the limit is reached; return `is_done()`."""
    deadline = world.time + limit_seconds
    while not monitor.violations and world.time < deadline:
        if is_done is not None and is_done():
            return True
        if len(world.server.history) > MAX_COMMITS:
            monitor.report(f"no convergence: more than {MAX_COMMITS} commits")
        await asyncio.sleep(TICK_SECONDS)
        monitor.check_idle_nodes(TICK_SECONDS)
        monitor.check_service(TICK_SECONDS)
    return is_done is not None and is_done()


def _is_waiting_legitimately(world: World) -> bool:
    """Return whether the job waits for Kubernetes nodes or for a name in use, and its status reports this reason."""
    pending_reason: str = world.status.get("waiting", {}).get("reason", "")
    if pending_reason == Reason.NAME_TAKEN:
        return world.has_foreign_objects()
    if pending_reason == Reason.PREDECESSOR_TERMINATING:
        return any(world.is_lost(pod) for _, pod in world.list_all_pods())
    is_backing_off = any(
        record.get("reason") == Reason.GANG_INCOMPLETE for record in world.status.get("attempts", ())[-2:]
    )
    return world.lacks_k8s_nodes() and (pending_reason == Reason.UNSCHEDULABLE or is_backing_off)


def _check_liveness(world: World, monitor: InvariantMonitor, liveness: Liveness) -> None:
    if liveness is Liveness.ENDS or _is_waiting_legitimately(world):
        return
    if world.get_condition_status("Complete") != "True":
        monitor.report(f"not complete although the program did not fail: {world.status.get('conditions')}")
    if liveness is Liveness.COMPLETES_UNDISTURBED and world.status.get("restarts"):
        monitor.report(f"restarted {world.status['restarts']} times although no fault was injected into pods or nodes")


async def _check_settled(world: World, monitor: InvariantMonitor) -> None:
    """Check that no process of the finished job runs, nothing is written, and no pod of a deleted job remains."""
    if not world.is_finished():
        monitor.report("the job did not stay ended")
    for process in world.list_running_processes():
        _, k8s_node = world.k8s_nodes.processes[process.pod_uid]
        if k8s_node.connected.is_set():
            monitor.report(f"a process of attempt {process.attempt} still runs on {k8s_node.name}")
    remaining = [key.name for key, pod in world.list_all_pods() if not world.is_lost(pod)]
    if world.job is None and remaining:
        monitor.report(f"the job was deleted, but these pods remain: {remaining}")
    before = len(world.server.history)
    await asyncio.sleep(SETTLING_SECONDS)
    for change in world.server.history[before:]:
        if change.actor.startswith("operator"):
            monitor.report(f"written although nothing changed: {change.type} {change.kind} {change.body}")


logging.getLogger("asyncio").setLevel(logging.CRITICAL)
