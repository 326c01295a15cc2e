"""Kinds of histories; each kind draws a few faults per history from its own list."""

from collections.abc import Callable, Sequence
from typing import Any

from testing.simulator.history import Liveness, Scenario, Trigger
from testing.simulator.incidents.job_incidents import (
    OPERATOR_INCIDENTS,
    TRAINER_INCIDENTS,
    USER_INCIDENTS,
    Incident,
    crash_operator,
    delete_pod,
    evict_pod,
    exhaust_gpu_memory,
    hang_rank,
    kill_container,
    kill_rank,
    preempt_by_kueue,
    suspend_job_temporarily,
)
from testing.simulator.incidents.node_incidents import (
    NODE_INCIDENTS,
    NODE_LOSSES,
    break_gpu,
    cut_power,
    occupy_k8s_nodes,
)
from testing.simulator.incidents.user_interference import USER_INTERFERENCE
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS, NetworkFaults
from testing.simulator.world.trainer import Workload

MAX_INCIDENTS = 6
MAX_TAKEOVERS = 3

DELAYS_SECONDS = (3.0, 8.0, 0.02, 0.3, 1.0, 5.0, 10.0, 12.0, 14.0, 16.0, 25.0, 70.0)
DELAYS_AFTER_COMMIT_SECONDS = (0.0, 0.0015, 0.05, 1.0, 3.0)
OVERLAPS_SECONDS = (0.1, 0.01, 2.0, 15.0, 120.0)

DrawScenario = Callable[[Choices], Scenario]


def all_faults(choices: Choices) -> Scenario:
    """Draw a scenario with faults of all kinds and one leader at a time."""
    incidents = (*USER_INCIDENTS, *TRAINER_INCIDENTS, *NODE_INCIDENTS, *OPERATOR_INCIDENTS)
    return _build_scenario(choices, incidents, network_faults=_draw_network_faults(choices))


def split_brain(choices: Choices) -> Scenario:
    """Draw a scenario with faults of all kinds, in which several operators act as leaders."""
    incidents = (*USER_INCIDENTS, *TRAINER_INCIDENTS, *NODE_INCIDENTS, *OPERATOR_INCIDENTS)
    return _build_scenario(
        choices,
        incidents,
        network_faults=_draw_network_faults(choices),
        takeovers=_draw_takeovers(choices, min_takeovers=1),
    )


def stale_caches(choices: Choices) -> Scenario:
    """Draw a scenario in which watch events have long delays while operators and users act."""
    network_faults = NetworkFaults(
        slow_requests=_draw_rate(choices, 10.0),
        crashes=_draw_rate(choices, 5.0),
        delayed_events=choices.pick((50.0, 90.0)),
    )
    incidents = (suspend_job_temporarily, crash_operator, kill_container, delete_pod)
    return _build_scenario(choices, incidents, network_faults=network_faults)


def failing_job_nodes(choices: Choices) -> Scenario:
    """Draw a scenario in which nodes of the job fail on a healthy cluster with a reliable network."""
    return _build_scenario(choices, (kill_container, kill_rank, hang_rank, cut_power), network_faults=NO_FAULTS)


def operator_faults(choices: Choices) -> Scenario:
    """Draw a scenario with faults only of operators and their connections; the first attempt must complete."""
    return Scenario(
        workload=Workload(num_nodes=choices.pick((2, 1, 3)), rendezvous_timeout_seconds=3600.0),
        network_faults=_draw_network_faults(choices),
        incidents=_draw_incidents(choices, OPERATOR_INCIDENTS),
        takeovers=_draw_takeovers(choices),
        liveness=Liveness.COMPLETES_UNDISTURBED,
    )


def lost_k8s_nodes(choices: Choices) -> Scenario:
    """Draw a scenario in which Kubernetes nodes are lost and recover during long training runs.

    The losses must not use up the restart budget. A few restarts are allowed, because a failure is unexplained if a
    pod is removed before an operator observes it.
    """
    policy = {
        "maxRestarts": 3,
        "backoffSeconds": 1,
        "maxBackoffSeconds": 20,
        "avoidFailingNodes": choices.draw_boolean(50),
    }
    return Scenario(
        workload=Workload(
            num_nodes=choices.pick((2, 1, 3)),
            total_steps=choices.pick((6, 15)),
            step_seconds=choices.pick((2.0, 40.0)),
            rendezvous_timeout_seconds=3600.0,
        ),
        spec_fields={"restartPolicy": policy},
        network_faults=choices.pick((NO_FAULTS, _draw_network_faults(choices))),
        incidents=_draw_incidents(
            choices, (*NODE_LOSSES, *NODE_LOSSES, evict_pod, *OPERATOR_INCIDENTS), extra_delays=(30.0, 300.0)
        ),
        takeovers=_draw_takeovers(choices),
        faults_end_seconds=choices.pick((240.0, 600.0, 1200.0)),
        liveness=Liveness.COMPLETES,
    )


def resource_faults(choices: Choices) -> Scenario:
    """Draw a scenario with broken GPUs, full nodes, hangs and OOM failures.

    The job has a large restart budget and must complete.
    """
    spec_fields = {
        "restartPolicy": {"maxRestarts": 20, "backoffSeconds": 1, "maxBackoffSeconds": 20},
        "startupDeadlineSeconds": choices.pick((20, 0, 60)),
        "training": {"perDeviceTrainBatchSize": choices.pick((4, 1, 6))},
    }
    frequent = 3 * (hang_rank, exhaust_gpu_memory, occupy_k8s_nodes, break_gpu)
    incidents = (*NODE_INCIDENTS, *frequent, kill_rank, crash_operator)
    return Scenario(
        workload=Workload(
            num_nodes=choices.pick((2, 1, 3)), total_steps=choices.pick((6, 30)), hang_timeout_seconds=30.0
        ),
        spec_fields=spec_fields,
        network_faults=choices.pick((NO_FAULTS, _draw_network_faults(choices))),
        incidents=_draw_incidents(choices, incidents, extra_delays=(10.0, 100.0)),
        takeovers=_draw_takeovers(choices),
        faults_end_seconds=choices.pick((240.0, 600.0)),
        liveness=Liveness.COMPLETES,
    )


def user_interference(choices: Choices) -> Scenario:
    """Draw a scenario with user interference and clock jumps.

    The job has a large restart budget and must complete.
    """
    spec_fields = {
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
            rendezvous_timeout_seconds=choices.pick((120.0, 3600.0)),
        ),
        spec_fields=spec_fields,
        network_faults=choices.pick((NO_FAULTS, _draw_network_faults(choices))),
        incidents=_draw_incidents(choices, USER_INTERFERENCE, extra_delays=(10.0, 100.0)),
        takeovers=_draw_takeovers(choices),
        faults_end_seconds=choices.pick((60.0, 240.0, 600.0)),
        liveness=Liveness.COMPLETES,
    )


def preemptions(choices: Choices) -> Scenario:
    """Draw a scenario in which Kueue preempts the job in favour of named workloads.

    The job has no restart budget and must complete.
    """
    return Scenario(
        workload=Workload(
            num_nodes=choices.pick((2, 1, 3)), total_steps=choices.pick((6, 15)), rendezvous_timeout_seconds=3600.0
        ),
        spec_fields={"restartPolicy": {"maxRestarts": 0, "maxInfrastructureRestarts": 0}},
        incidents=_draw_incidents(choices, (preempt_by_kueue,), extra_delays=(10.0, 40.0)),
        faults_end_seconds=choices.pick((60.0, 240.0)),
        liveness=Liveness.COMPLETES,
    )


SCENARIO_KINDS: dict[str, DrawScenario] = {
    draw.__name__: draw
    for draw in (
        all_faults,
        split_brain,
        stale_caches,
        failing_job_nodes,
        operator_faults,
        lost_k8s_nodes,
        resource_faults,
        user_interference,
        preemptions,
    )
}


def _build_scenario(
    choices: Choices,
    incidents: Sequence[Incident],
    *,
    network_faults: NetworkFaults,
    takeovers: tuple[tuple[Trigger, float], ...] = (),
) -> Scenario:
    return Scenario(
        workload=Workload(num_nodes=choices.pick((2, 1, 3)), total_steps=choices.pick((6, 15))),
        spec_fields=_draw_spec_fields(choices),
        network_faults=network_faults,
        incidents=_draw_incidents(choices, incidents),
        takeovers=takeovers,
        is_resumed_at_end=choices.pick((True, True, True, False)),
        faults_end_seconds=choices.pick((60.0, 240.0)),
    )


def _draw_spec_fields(choices: Choices) -> dict[str, Any]:
    """Draw the spec fields that the workload does not determine."""
    policy = {
        "maxRestarts": choices.pick((1, 0, 3)),
        "maxInfrastructureRestarts": choices.pick((1, 0, 3)),
        "backoffSeconds": choices.pick((1, 0, 10)),
        "maxBackoffSeconds": 20,
        "avoidFailingNodes": choices.pick((True, True, False)),
    }
    spec_fields: dict[str, Any] = {"restartPolicy": policy}
    for name, values in (
        ("activeDeadlineSeconds", (None, None, None, 5, 20, 60)),
        ("pendingDeadlineSeconds", (None, None, None, 5, 30, 200)),
        ("startupDeadlineSeconds", (None, 0, 20, 60)),
        ("ttlSecondsAfterFinished", (None, None, None, None, None, None, 0, 5, 60)),
        ("suspend", (None, None, None, None, True)),
    ):
        value = choices.pick(values)
        if value is not None:
            spec_fields[name] = value
    return spec_fields


def _draw_network_faults(choices: Choices) -> NetworkFaults:
    return NetworkFaults(
        slow_requests=_draw_rate(choices, 10.0, 50.0),
        rejected_requests=_draw_rate(choices, 5.0, 20.0),
        lost_responses=_draw_rate(choices, 5.0, 20.0),
        crashes=_draw_rate(choices, 2.0, 10.0),
        delayed_events=_draw_rate(choices, 10.0, 50.0),
        broken_watches=_draw_rate(choices, 5.0, 20.0),
        repeated_events=_draw_rate(choices, 10.0),
    )


def _draw_rate(choices: Choices, *percentages: float) -> float:
    """Draw a fault rate in percent, which is 0 in at least half of the draws."""
    return choices.pick((0.0, 0.0, *percentages))


def _draw_incidents(
    choices: Choices, incidents: Sequence[Incident], *, extra_delays: tuple[float, ...] = ()
) -> tuple[tuple[Trigger, Incident], ...]:
    """Draw up to MAX_INCIDENTS incidents with their triggers; `extra_delays`: further possible delays in seconds."""
    count = choices.draw_number(MAX_INCIDENTS + 1)
    return tuple((_draw_trigger(choices, extra_delays), choices.pick(incidents)) for _ in range(count))


def _draw_trigger(choices: Choices, extra_delays: tuple[float, ...] = ()) -> Trigger:
    """Draw a trigger; half of the triggers fire soon after a commit, when most races occur."""
    if choices.draw_number(2):
        return Trigger(seconds=choices.pick(DELAYS_AFTER_COMMIT_SECONDS), commit_number=4 + choices.draw_number(37))
    return Trigger(seconds=choices.pick((*DELAYS_SECONDS, *(4 * extra_delays))))


def _draw_takeovers(choices: Choices, *, min_takeovers: int = 0) -> tuple[tuple[Trigger, float], ...]:
    """Draw the trigger of each leader change and the seconds for which the former leader continues to act."""
    count = min_takeovers + choices.draw_number(MAX_TAKEOVERS + 1 - min_takeovers)
    return tuple((_draw_trigger(choices), choices.pick(OVERLAPS_SECONDS)) for _ in range(count))
