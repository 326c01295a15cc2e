"""Runs one simulated history, in which faults are injected into jobs and their cluster."""

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
from finetune_operator.manager import leader_election, manager
from testing.fakes.virtual_time import VirtualTimeLoop
from testing.simulator.attempt_invariants import AttemptMonitor
from testing.simulator.cluster_invariants import ClusterMonitor
from testing.simulator.gang_invariants import GangMonitor
from testing.simulator.gpu_invariants import GpuMonitor
from testing.simulator.incidents.job_incidents import Incident
from testing.simulator.invariants import REASONS_WITH_OWN_TIMEOUT, JobMonitor
from testing.simulator.obligations import ObligationMonitor
from testing.simulator.queue_invariants import QueueMonitor
from testing.simulator.world.apiserver import TERMINAL, Change, ObjectKey
from testing.simulator.world.choices import Choices
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.network import NO_FAULTS, NetworkFaults
from testing.simulator.world.operator_process import exit_immediately
from testing.simulator.world.releases import load_next_release
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import DEFAULT_OPTIONS, JOB, SPARE_K8S_NODES, ErrorLog, World, WorldOptions

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
class JobScenario:
    """A further job of a history, with the faults that are injected into it."""

    key: ObjectKey
    num_nodes: int = 2
    spec_fields: dict[str, Any] = field(default_factory=dict)
    incidents: tuple[tuple[Trigger, Incident], ...] = ()
    liveness: Liveness = Liveness.ENDS
    is_resumed_at_end: bool = True
    is_poisoned: bool = False  # the operator only has to apply suspend, deadlines, TTL and deletion


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
    further_jobs: tuple[JobScenario, ...] = ()
    options: WorldOptions = DEFAULT_OPTIONS
    settling_seconds: float = SETTLING_SECONDS
    begins_with_next_release: bool = False
    has_overlapping_operators: bool = False  # operators that end may still send requests while the next one leads

    @property
    def jobs(self) -> tuple[JobScenario, ...]:
        """All jobs; the first one is described by the fields of this scenario."""
        first = JobScenario(
            JOB, self.workload.num_nodes, self.spec_fields, self.incidents, self.liveness, self.is_resumed_at_end
        )
        return (first, *self.further_jobs)


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
        mock.patch.object(manager, "exit_immediately", exit_immediately),
        mock.patch.object(leader_election.logger, "disabled", True),  # a lost lease is an error in its log
    ):
        return runner.run(_run_history(scenario, choices))


@dataclass(frozen=True)
class RunningHistory:
    """The world of a history with the monitors of its invariants; `jobs` pairs each job with its scenario."""

    world: World
    scenario: Scenario
    jobs: tuple[tuple[SimulatedJob, JobScenario], ...]
    job_monitors: tuple[JobMonitor, ...]
    obligation_monitors: tuple[ObligationMonitor, ...]
    cluster_monitor: ClusterMonitor
    attempt_monitor: AttemptMonitor
    gpu_monitor: GpuMonitor
    queue_monitor: QueueMonitor
    gang_monitor: GangMonitor

    def are_jobs_finished(self) -> bool:
        """Return whether every job has finished, is suspended as requested or was deleted."""
        return all(self.is_finished(job, plan) for job, plan in self.jobs)

    def is_finished(self, job: SimulatedJob, plan: JobScenario) -> bool:
        """Return whether the job has finished; a poisoned one only has to release its Kubernetes nodes."""
        if not plan.is_poisoned:
            return job.is_finished()
        return all(self.world.is_lost(pod) or pod["status"].get("phase") in TERMINAL for _, pod in job.list_pods())


def _start_history(scenario: Scenario, choices: Choices) -> RunningHistory:
    first, *further_jobs = scenario.jobs
    world = World(
        choices,
        scenario.workload,
        network_faults=scenario.network_faults,
        options=scenario.options,
        **first.spec_fields,
    )
    world.has_split_brain = bool(scenario.takeovers) or scenario.has_overlapping_operators
    for plan in further_jobs:
        world.create_job(plan.key, numNodes=plan.num_nodes, **plan.spec_fields)
    jobs = tuple(zip(world.jobs, scenario.jobs, strict=True))
    world.poisoned_uids.update(job.uid for job, plan in jobs if plan.is_poisoned)
    monitors = tuple(
        JobMonitor(job, has_split_brain=world.has_split_brain) for job, plan in jobs if not plan.is_poisoned
    )
    return RunningHistory(
        world=world,
        scenario=scenario,
        jobs=jobs,
        job_monitors=monitors,
        obligation_monitors=tuple(map(ObligationMonitor, world.jobs)),
        cluster_monitor=ClusterMonitor(world),
        attempt_monitor=AttemptMonitor(world),
        gpu_monitor=GpuMonitor(world),
        queue_monitor=QueueMonitor(world),
        gang_monitor=GangMonitor(world),
    )


def _report_task_error(world: World, context: dict[str, Any]) -> None:
    """Report an exception of a background task.

    The error that Python raises when it closes a stream of a killed process is ignored.
    """
    if "asynchronous generator is already running" not in str(context.get("exception")):
        world.report(f"a task failed: {context}")


async def _run_history(scenario: Scenario, choices: Choices) -> HistoryResult:
    history = _start_history(scenario, choices)
    world = history.world
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _report_task_error(world, context))
    errors = ErrorLog(world.report)
    controller_log.addHandler(errors)
    try:
        await _run_phases(history)
        history.cluster_monitor.check_output()
        if not world.violations:
            for job, plan in history.jobs:
                _check_liveness(job, plan.liveness)
    finally:
        controller_log.removeHandler(errors)
        for operator in world.operators:
            operator.crash()
    status = world.jobs[0].status
    return HistoryResult(
        violations=world.violations,
        trace=world.trace,
        phase=status.get("phase", "Deleted"),
        restarts=status.get("restarts", 0),
        commits=len(world.server.history),
        failure_reasons=tuple(
            record["reason"] for record in status.get("attempts", ()) if record["state"] == AttemptState.FAILED
        ),
    )


def _start_operators(history: RunningHistory) -> None:
    """Start the operators and schedule the faults."""
    world, scenario = history.world, history.scenario
    if scenario.begins_with_next_release:
        world.release = load_next_release()
    for _ in range(scenario.options.replicas):
        world.start_operator()
    for trigger, overlap in scenario.takeovers:
        _schedule_fault(world, trigger, functools.partial(world.take_over, overlap))
    for job, plan in history.jobs:
        for trigger, incident in plan.incidents:
            _schedule_fault(world, trigger, functools.partial(_inject, job, incident))


async def _run_phases(history: RunningHistory) -> None:
    world, scenario = history.world, history.scenario
    _start_operators(history)
    # inject the faults, then stop and repair the temporary ones
    await _advance(history, is_done=None, limit_seconds=scenario.faults_end_seconds)
    world.end_faults()
    _recover_k8s_nodes(world)
    for job, plan in history.jobs:
        if plan.is_poisoned:
            _end_poisoned_job(job)
        elif plan.is_resumed_at_end:
            job.edit_spec(suspend=False)
    # every job must finish, or report a valid reason to wait
    are_ended = await _advance(history, is_done=history.are_jobs_finished, limit_seconds=HORIZON_SECONDS)
    if world.violations:
        return
    if not are_ended:
        for job, plan in history.jobs:
            if not history.is_finished(job, plan) and not _is_waiting_legitimately(job):
                world.report(f"{job} does not end: {job.status.get('phase')} {job.status.get('conditions')}")
        return
    # after the jobs have finished, nothing may change
    await _advance(history, is_done=None, limit_seconds=scenario.settling_seconds)
    await _check_settled(history)


def _end_poisoned_job(job: SimulatedJob) -> None:
    """Suspend the job, set a deadline or delete it, which must take effect whatever its objects contain."""
    match job.world.choices.pick(("suspend", "deadline", "delete")):
        case "suspend":
            job.edit_spec(suspend=True)
        case "deadline":
            job.edit_spec(suspend=False, activeDeadlineSeconds=60)
        case _:
            job.world.delete(job.key, {"propagationPolicy": "Background"})


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


def _inject(job: SimulatedJob, incident: Incident) -> None:
    job.world.add_trace(f"incident: {incident.__name__}" + (f" ({job})" if len(job.world.jobs) > 1 else ""))
    incident(job.world, job)


def _recover_k8s_nodes(world: World) -> None:
    """Recover all Kubernetes nodes except the spare ones, so that no job stays pending forever."""
    disconnected = [k8s_node for k8s_node in world.k8s_nodes.nodes if not k8s_node.connected.is_set()]
    for k8s_node in disconnected[SPARE_K8S_NODES:]:
        world.node_controllers.recover(k8s_node)


async def _advance(history: RunningHistory, *, is_done: Callable[[], bool] | None, limit_seconds: float) -> bool:
    """Run until `is_done` returns True, an invariant is violated or the limit is reached; return `is_done()`."""
    world = history.world
    deadline = world.time + limit_seconds
    while not world.violations and world.time < deadline:
        if is_done is not None and is_done():
            return True
        if len(world.server.history) > MAX_COMMITS * len(world.jobs):
            world.report(f"no convergence: {len(world.server.history)} commits")
        await asyncio.sleep(TICK_SECONDS)
        for monitor in history.job_monitors:
            monitor.check_idle_nodes(TICK_SECONDS)
            monitor.check_service(TICK_SECONDS)
        for obligation_monitor in history.obligation_monitors:
            obligation_monitor.check(TICK_SECONDS)
        history.cluster_monitor.check_queues()
        history.queue_monitor.check(TICK_SECONDS)
        history.gang_monitor.check(TICK_SECONDS)
    return is_done is not None and is_done()


def _is_waiting_legitimately(job: SimulatedJob) -> bool:
    """Return whether the job waits for Kubernetes nodes or for a name in use, and its status reports this reason."""
    world = job.world
    pending_reason: str = job.status.get("waiting", {}).get("reason", "")
    if pending_reason == Reason.NAME_TAKEN:
        return world.has_foreign_objects()
    if pending_reason == Reason.PREDECESSOR_TERMINATING:
        return job.has_orphaned_pods() or any(world.is_lost(pod) for _, pod in job.list_pods_of_all_uids())
    # the nodes that ran gave up waiting for the others, after almost the whole time that the job has to end
    has_given_up = any(record.get("reason") == Reason.GANG_INCOMPLETE for record in job.status.get("attempts", ())[-2:])
    if has_given_up and world.has_foreign_objects():
        return True
    return job.lacks_k8s_nodes() and (pending_reason == Reason.UNSCHEDULABLE or has_given_up)


def _has_timed_out_early(job: SimulatedJob) -> bool:
    """Return whether the job failed by a timeout that the wrong clock of an operator may have ended too early."""
    return job.world.operator_clock_was_ahead and job.get_condition_reason("Failed") in REASONS_WITH_OWN_TIMEOUT


def _check_liveness(job: SimulatedJob, liveness: Liveness) -> None:
    if liveness is Liveness.ENDS or _is_waiting_legitimately(job) or _has_timed_out_early(job):
        return
    report, status = job.world.report, job.status
    if job.get_condition_status("Complete") != "True":
        report(f"{job} is not complete although the program did not fail: {status.get('conditions')}")
    if liveness is Liveness.COMPLETES_UNDISTURBED and status.get("restarts"):
        report(f"{job} restarted {status['restarts']} times although no fault was injected into pods or nodes")


async def _check_settled(history: RunningHistory) -> None:
    """Check that no process of the finished jobs runs, nothing is written, and no pod of a deleted job remains."""
    world = history.world
    if not history.are_jobs_finished():
        world.report("the jobs did not stay ended")
    for process in world.list_running_processes():
        _, k8s_node = world.k8s_nodes.processes[process.pod_uid]
        if k8s_node.connected.is_set():
            world.report(f"a process of attempt {process.attempt} still runs on {k8s_node.name}")
    for job in world.jobs:
        remaining = [key.name for key, pod in job.list_pods_of_all_uids() if not world.is_lost(pod)]
        if job.body is None and remaining:
            world.report(f"{job} was deleted, but these pods remain: {remaining}")
    history.gang_monitor.check_settled()
    before = len(world.server.history)
    await asyncio.sleep(history.scenario.settling_seconds)
    for change in world.server.history[before:]:
        if change.actor.startswith("operator"):
            world.report(f"written although nothing changed: {change.type} {change.kind} {change.body}")


logging.getLogger("asyncio").setLevel(logging.CRITICAL)
