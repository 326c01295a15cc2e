"""One history: a job, the weather, what happens when, and what came of it."""

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
from finetune_operator.controller.controller import logger as controller_log
from testing.fakes.virtual_time import VirtualTimeLoop
from testing.simulator.incidents.job_incidents import Incident
from testing.simulator.invariants import Monitor
from testing.simulator.world.apiserver import Change
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import CALM, Weather
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import SPARE_MACHINES, ErrorLog, World

HORIZON_SECONDS = 3600.0
SETTLING_SECONDS = 400.0  # longer than any grace period or tolerated absence
TICK_SECONDS = 10.0
MOST_COMMITS = 5000


@dataclass(frozen=True)
class Moment:
    """Some seconds after the commit of that number; interesting things happen close to commits."""

    seconds: float
    commits: int = 0


TWO_NODES = Workload(num_nodes=2)


class Promise(StrEnum):
    """What must come of a history, whatever happens on the way."""

    END = "ends, or waits for what it names"
    COMPLETE = "is complete, or waits for what it names"
    UNDISTURBED = "is complete in the first attempt"


@dataclass(frozen=True)
class Scenario:
    """What is decided beforehand; the rest is up to the choices on the way."""

    workload: Workload = TWO_NODES
    fields: dict[str, Any] = field(default_factory=dict)
    weather: Weather = CALM
    incidents: tuple[tuple[Moment, Incident], ...] = ()
    takeovers: tuple[tuple[Moment, float], ...] = ()  # when another operator leads, and how long the old one goes on
    promise: Promise = Promise.END
    resume_at_end: bool = True
    faults_end: float = 60.0


@dataclass(frozen=True)
class Story:
    """How it went."""

    violations: list[str]
    trace: list[str]
    phase: str
    restarts: int
    commits: int


def play(scenario: Scenario, choices: Choices) -> Story:
    """The whole history, in virtual time."""
    random.seed(choices.number(1000))  # for the jitter of the operator's pauses
    with (
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
        mock.patch("time.monotonic", runner.get_loop().time),
    ):
        return runner.run(_play(scenario, choices))


def _report_unless_left(monitor: Monitor, context: dict[str, Any]) -> None:
    """What failed unseen; but for a stream that a killed process left half read, which Python then fails to close."""
    if "asynchronous generator is already running" not in str(context.get("exception")):
        monitor.report(f"a task failed: {context}")


async def _play(scenario: Scenario, choices: Choices) -> Story:
    world = World(choices, scenario.workload, weather=scenario.weather, **scenario.fields)
    world.several_operators = bool(scenario.takeovers)
    monitor = Monitor(world, several_operators=world.several_operators)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _report_unless_left(monitor, context))
    errors = ErrorLog(monitor.report)
    controller_log.addHandler(errors)
    try:
        await _live(world, monitor, scenario)
        monitor.check_output()
        if not monitor.violations:
            _check_promise(world, monitor, scenario.promise)
    finally:
        controller_log.removeHandler(errors)
    return Story(
        violations=monitor.violations,
        trace=world.trace,
        phase=world.status.get("phase", "Deleted"),
        restarts=world.status.get("restarts", 0),
        commits=len(world.server.history),
    )


async def _live(world: World, monitor: Monitor, scenario: Scenario) -> None:
    world.start_operator()
    for moment, overlap in scenario.takeovers:
        _at(world, moment, functools.partial(world.take_over, overlap))
    for moment, incident in scenario.incidents:
        _at(world, moment, functools.partial(_happen, world, incident))
    await _advance(world, monitor, until=None, limit=scenario.faults_end)
    world.calm_down()
    _bring_back_enough(world, scenario)
    if scenario.resume_at_end:
        world.edit_spec(suspend=False)
    ended = await _advance(world, monitor, until=world.finished, limit=HORIZON_SECONDS)
    if monitor.violations:
        return
    if not ended:
        if not _waits_rightly(world):
            monitor.report(f"no end: {world.status.get('phase')} {world.status.get('conditions')}")
        return
    await _advance(world, monitor, until=None, limit=SETTLING_SECONDS)
    await _check_rest(world, monitor)


def _at(world: World, moment: Moment, act: Callable[[], None]) -> None:
    """Plan something; the end of the faults is the end of what is only planned."""

    def start() -> None:
        asyncio.get_running_loop().call_later(moment.seconds, lambda: None if world.calm else act())

    def hear(change: Change) -> None:
        if len(world.server.history) == moment.commits:
            start()

    if moment.commits:
        world.server.listeners.append(hear)
    else:
        start()


def _happen(world: World, incident: Incident) -> None:
    world.note(f"incident: {incident.__name__}")
    incident(world)


def _bring_back_enough(world: World, scenario: Scenario) -> None:
    """Some machines may stay away for ever, but a job that nobody can place would wait for ever."""
    lost = [machine for machine in world.machines.machines if not machine.up.is_set()]
    for machine in lost[SPARE_MACHINES:]:
        world.nodes.find(machine)


async def _advance(world: World, monitor: Monitor, *, until: Callable[[], bool] | None, limit: float) -> bool:
    """Until something holds or is found wrong, or the limit is reached; says whether it holds."""
    deadline = world.time + limit
    while not monitor.violations and world.time < deadline:
        if until is not None and until():
            return True
        if len(world.server.history) > MOST_COMMITS:
            monitor.report("no rest: too many writes")
        await asyncio.sleep(TICK_SECONDS)
        monitor.check_idle(TICK_SECONDS)
        monitor.check_service(TICK_SECONDS)
    return until is not None and until()


def _waits_rightly(world: World) -> bool:
    """There are too few machines, or somebody keeps a name, and the status says so, or pauses after it has."""
    said: str = world.status.get("waiting", {}).get("reason", "")
    if said == Reason.NAME_TAKEN:
        return world.has_strangers()
    if said == Reason.PREDECESSOR_TERMINATING:
        return any(world.is_lost(pod) for _, pod in world.all_pods())
    pauses = any(record.get("reason") == Reason.GANG_INCOMPLETE for record in world.status.get("attempts", ())[-2:])
    return world.lacks_machines() and (said == Reason.UNSCHEDULABLE or pauses)


def _check_promise(world: World, monitor: Monitor, promise: Promise) -> None:
    if promise is Promise.END or _waits_rightly(world):
        return
    if world.condition("Complete") != "True":
        monitor.report(f"not complete although the program was well: {world.status.get('conditions')}")
    if promise is Promise.UNDISTURBED and world.status.get("restarts"):
        monitor.report(f"restarted {world.status['restarts']} times although nothing happened to pods or machines")


async def _check_rest(world: World, monitor: Monitor) -> None:
    """After the end nothing runs, nothing is written, and of a deleted job nothing is left."""
    if not world.finished():
        monitor.report("an end that did not last")
    for process in world.running_processes():
        _, machine = world.machines.processes[process.pod_uid]
        if machine.up.is_set():
            monitor.report(f"a process of attempt {process.attempt} still runs on {machine.name}")
    left = [key.name for key, pod in world.all_pods() if not world.is_lost(pod)]
    if world.job is None and left:
        monitor.report(f"the job is gone, but these are left: {left}")
    before = len(world.server.history)
    await asyncio.sleep(SETTLING_SECONDS)
    for change in world.server.history[before:]:
        if change.actor.startswith("operator"):
            monitor.report(f"written although nothing happens any more: {change.type} {change.kind} {change.body}")


logging.getLogger("asyncio").setLevel(logging.CRITICAL)
