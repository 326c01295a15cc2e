"""Which histories there are: each kind has only some troubles, and each history few of those, so that they go deep."""

from collections.abc import Callable, Sequence
from typing import Any

from testing.simulator.history import Moment, Promise, Scenario
from testing.simulator.incidents.job_incidents import (
    OPERATOR_INCIDENTS,
    TRAINER_INCIDENTS,
    USER_INCIDENTS,
    Incident,
    container_killed,
    gpu_out_of_memory,
    operator_crashed,
    pod_deleted,
    pod_evicted,
    rank_hung,
    rank_killed,
    suspended_for_a_while,
)
from testing.simulator.incidents.node_incidents import (
    LOSSES,
    MACHINE_INCIDENTS,
    crowded,
    machine_broken,
    machine_without_power,
)
from testing.simulator.incidents.user_interference import MEDDLING
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import CALM, Weather
from testing.simulator.world.trainer import Workload

MOST_INCIDENTS = 6
MOST_TAKEOVERS = 3

SECONDS = (3.0, 8.0, 0.02, 0.3, 1.0, 5.0, 10.0, 12.0, 14.0, 16.0, 25.0, 70.0)
AFTER_COMMITS = (0.0, 0.0015, 0.05, 1.0, 3.0)
OVERLAPS = (0.1, 0.01, 2.0, 15.0, 120.0)

Draw = Callable[[Choices], Scenario]


def anything(choices: Choices) -> Scenario:
    """Whatever can happen to a job, with one operator at a time."""
    incidents = (*USER_INCIDENTS, *TRAINER_INCIDENTS, *MACHINE_INCIDENTS, *OPERATOR_INCIDENTS)
    return _scenario(choices, incidents, weather=_weather(choices))


def takeovers(choices: Choices) -> Scenario:
    """The same, with operators that all believe they lead."""
    incidents = (*USER_INCIDENTS, *TRAINER_INCIDENTS, *MACHINE_INCIDENTS, *OPERATOR_INCIDENTS)
    return _scenario(choices, incidents, weather=_weather(choices), takeovers=_takeovers(choices, least=1))


def stale_caches(choices: Choices) -> Scenario:
    """Operators and users act while the watches are far behind."""
    weather = Weather(slow=_rate(choices, 10.0), crash=_rate(choices, 5.0), lag=choices.pick((50.0, 90.0)))
    incidents = (suspended_for_a_while, operator_crashed, container_killed, pod_deleted)
    return _scenario(choices, incidents, weather=weather)


def failing_nodes(choices: Choices) -> Scenario:
    """Nodes fail and everything else goes well."""
    return _scenario(choices, (container_killed, rank_killed, rank_hung, machine_without_power), weather=CALM)


def operator_troubles(choices: Choices) -> Scenario:
    """Only operators and their way to the API server have trouble, which must never reach the training."""
    return Scenario(
        workload=Workload(num_nodes=choices.pick((2, 1, 3)), patience_seconds=3600.0),
        weather=_weather(choices),
        incidents=_happenings(choices, OPERATOR_INCIDENTS),
        takeovers=_takeovers(choices),
        promise=Promise.UNDISTURBED,
    )


def lost_machines(choices: Choices) -> Scenario:
    """Long trainings whose machines get lost and come back, under one operator or two, which is no fault of the job.

    It needs a few restarts of its own all the same: what a node left behind is gone if no operator is there to see it.
    """
    policy = {"maxRestarts": 3, "backoffSeconds": 1, "maxBackoffSeconds": 20, "avoidFailingNodes": choices.chance(50)}
    return Scenario(
        workload=Workload(
            num_nodes=choices.pick((2, 1, 3)),
            total_steps=choices.pick((6, 15)),
            step_seconds=choices.pick((2.0, 40.0)),
            patience_seconds=3600.0,
        ),
        fields={"restartPolicy": policy},
        weather=choices.pick((CALM, _weather(choices))),
        incidents=_happenings(choices, (*LOSSES, *LOSSES, pod_evicted, *OPERATOR_INCIDENTS), apart=(30.0, 300.0)),
        takeovers=_takeovers(choices),
        faults_end=choices.pick((240.0, 600.0, 1200.0)),
        promise=Promise.COMPLETE,
    )


def hard_times(choices: Choices) -> Scenario:
    """Machines that break or are full, ranks that hang or need too much memory: a patient job gets through."""
    fields = {
        "restartPolicy": {"maxRestarts": 20, "backoffSeconds": 1, "maxBackoffSeconds": 20},
        "startupDeadlineSeconds": choices.pick((20, 0, 60)),
        "training": {"perDeviceTrainBatchSize": choices.pick((4, 1, 6))},
    }
    often = 3 * (rank_hung, gpu_out_of_memory, crowded, machine_broken)
    incidents = (*MACHINE_INCIDENTS, *often, rank_killed, operator_crashed)
    return Scenario(
        workload=Workload(num_nodes=choices.pick((2, 1, 3)), total_steps=choices.pick((6, 30)), hang_seconds=30.0),
        fields=fields,
        weather=choices.pick((CALM, _weather(choices))),
        incidents=_happenings(choices, incidents, apart=(10.0, 100.0)),
        takeovers=_takeovers(choices),
        faults_end=choices.pick((240.0, 600.0)),
        promise=Promise.COMPLETE,
    )


def meddling(choices: Choices) -> Scenario:
    """People who get in the way of a patient job, and operators whose clocks jump: it gets through all the same."""
    fields = {
        "restartPolicy": {
            "maxRestarts": 20,
            "maxInfrastructureRestarts": 50,
            "backoffSeconds": 1,
            "maxBackoffSeconds": 20,
        },
        "startupDeadlineSeconds": choices.pick((20, 0, 60)),
    }
    return Scenario(
        workload=Workload(
            num_nodes=choices.pick((2, 1, 3)),
            total_steps=choices.pick((6, 15, 30)),
            patience_seconds=choices.pick((120.0, 3600.0)),
        ),
        fields=fields,
        weather=choices.pick((CALM, _weather(choices))),
        incidents=_happenings(choices, MEDDLING, apart=(10.0, 100.0)),
        takeovers=_takeovers(choices),
        faults_end=choices.pick((60.0, 240.0, 600.0)),
        promise=Promise.COMPLETE,
    )


KINDS: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (
        anything,
        takeovers,
        stale_caches,
        failing_nodes,
        operator_troubles,
        lost_machines,
        hard_times,
        meddling,
    )
}


def _scenario(
    choices: Choices,
    incidents: Sequence[Incident],
    *,
    weather: Weather,
    takeovers: tuple[tuple[Moment, float], ...] = (),
) -> Scenario:
    return Scenario(
        workload=Workload(num_nodes=choices.pick((2, 1, 3)), total_steps=choices.pick((6, 15))),
        fields=_fields(choices),
        weather=weather,
        incidents=_happenings(choices, incidents),
        takeovers=takeovers,
        resume_at_end=choices.pick((True, True, True, False)),
        faults_end=choices.pick((60.0, 240.0)),
    )


def _fields(choices: Choices) -> dict[str, Any]:
    """What the spec says besides the workload."""
    policy = {
        "maxRestarts": choices.pick((1, 0, 3)),
        "maxInfrastructureRestarts": choices.pick((1, 0, 3)),
        "backoffSeconds": choices.pick((1, 0, 10)),
        "maxBackoffSeconds": 20,
        "avoidFailingNodes": choices.pick((True, True, False)),
    }
    chosen: dict[str, Any] = {"restartPolicy": policy}
    for name, values in (
        ("activeDeadlineSeconds", (None, None, None, 5, 20, 60)),
        ("pendingDeadlineSeconds", (None, None, None, 5, 30, 200)),
        ("startupDeadlineSeconds", (None, 0, 20, 60)),
        ("ttlSecondsAfterFinished", (None, None, None, None, None, None, 0, 5, 60)),
        ("suspend", (None, None, None, None, True)),
    ):
        value = choices.pick(values)
        if value is not None:
            chosen[name] = value
    return chosen


def _weather(choices: Choices) -> Weather:
    return Weather(
        slow=_rate(choices, 10.0, 50.0),
        refused=_rate(choices, 5.0, 20.0),
        lost=_rate(choices, 5.0, 20.0),
        crash=_rate(choices, 2.0, 10.0),
        lag=_rate(choices, 10.0, 50.0),
        broken=_rate(choices, 5.0, 20.0),
        repeated=_rate(choices, 10.0),
    )


def _rate(choices: Choices, *percentages: float) -> float:
    """Mostly none at all."""
    return choices.pick((0.0, 0.0, *percentages))


def _happenings(
    choices: Choices, incidents: Sequence[Incident], *, apart: tuple[float, ...] = ()
) -> tuple[tuple[Moment, Incident], ...]:
    """Some of these incidents, each at its moment, a few of them later by these seconds."""
    count = choices.number(MOST_INCIDENTS + 1)
    return tuple((_moment(choices, apart), choices.pick(incidents)) for _ in range(count))


def _moment(choices: Choices, later: tuple[float, ...] = ()) -> Moment:
    """Interesting things happen close to commits."""
    if choices.number(2):
        return Moment(seconds=choices.pick(AFTER_COMMITS), commits=4 + choices.number(37))
    return Moment(seconds=choices.pick((*SECONDS, *(4 * later))))


def _takeovers(choices: Choices, *, least: int = 0) -> tuple[tuple[Moment, float], ...]:
    """When another operator takes over, and how long the one before goes on."""
    count = least + choices.number(MOST_TAKEOVERS + 1 - least)
    return tuple((_moment(choices), choices.pick(OVERLAPS)) for _ in range(count))
