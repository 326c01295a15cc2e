"""Kinds of histories; each kind draws a few faults per history from its own list."""

from collections.abc import Callable, Sequence

from testing.simulator.gang_scenarios import gang_pauses, gang_preemptions, gang_upgrades, gangs
from testing.simulator.history import Liveness, Scenario, Trigger
from testing.simulator.incidents.job_incidents import (
    OPERATOR_INCIDENTS,
    TRAINER_INCIDENTS,
    USER_INCIDENTS,
    Incident,
    cancel_job,
    crash_operator,
    delete_pod,
    evict_pod,
    exhaust_gpu_memory,
    hang_rank,
    kill_container,
    kill_rank,
    preempt_by_kueue,
    suspend_job,
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
from testing.simulator.queue_scenarios import queue_pauses, queue_preemptions, queued_jobs
from testing.simulator.scenario_choices import (
    draw_incidents,
    draw_network_faults,
    draw_rate,
    draw_spec_fields,
    draw_takeovers,
    draw_trigger,
)
from testing.simulator.shared_cluster_scenarios import (
    paused_operators,
    poisoned_jobs,
    several_jobs,
    strangers,
    two_releases,
)
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS, NetworkFaults
from testing.simulator.world.trainer import Workload

DrawScenario = Callable[[Choices], Scenario]


def all_faults(choices: Choices) -> Scenario:
    """Draw a scenario with faults of all kinds and one leader at a time."""
    incidents = (*USER_INCIDENTS, *TRAINER_INCIDENTS, *NODE_INCIDENTS, *OPERATOR_INCIDENTS)
    return _build_scenario(choices, incidents, network_faults=draw_network_faults(choices))


def split_brain(choices: Choices) -> Scenario:
    """Draw a scenario with faults of all kinds, in which several operators act as leaders."""
    incidents = (*USER_INCIDENTS, *TRAINER_INCIDENTS, *NODE_INCIDENTS, *OPERATOR_INCIDENTS)
    return _build_scenario(
        choices,
        incidents,
        network_faults=draw_network_faults(choices),
        takeovers=draw_takeovers(choices, min_takeovers=1),
    )


def stale_caches(choices: Choices) -> Scenario:
    """Draw a scenario in which watch events have long delays while operators and users act."""
    network_faults = NetworkFaults(
        slow_requests=draw_rate(choices, 10.0),
        crashes=draw_rate(choices, 5.0),
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
        network_faults=draw_network_faults(choices),
        incidents=draw_incidents(choices, OPERATOR_INCIDENTS),
        takeovers=draw_takeovers(choices),
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
        network_faults=choices.pick((NO_FAULTS, draw_network_faults(choices))),
        incidents=draw_incidents(
            choices, (*NODE_LOSSES, *NODE_LOSSES, evict_pod, *OPERATOR_INCIDENTS), extra_delays=(30.0, 300.0)
        ),
        takeovers=draw_takeovers(choices),
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
        network_faults=choices.pick((NO_FAULTS, draw_network_faults(choices))),
        incidents=draw_incidents(choices, incidents, extra_delays=(10.0, 100.0)),
        takeovers=draw_takeovers(choices),
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
        network_faults=choices.pick((NO_FAULTS, draw_network_faults(choices))),
        incidents=draw_incidents(choices, USER_INTERFERENCE, extra_delays=(10.0, 100.0)),
        takeovers=draw_takeovers(choices),
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
        incidents=draw_incidents(choices, (preempt_by_kueue,), extra_delays=(10.0, 40.0)),
        faults_end_seconds=choices.pick((60.0, 240.0)),
        liveness=Liveness.COMPLETES,
    )


def cancellations(choices: Choices) -> Scenario:
    """Draw a scenario in which the user cancels the job at some time, also while it is suspended or restarts.

    The obligations of the operator require that the job ends.
    """
    others = (suspend_job, suspend_job_temporarily, kill_rank, delete_pod, evict_pod, cut_power, crash_operator)
    return Scenario(
        workload=Workload(num_nodes=choices.pick((2, 1, 3)), total_steps=choices.pick((6, 15, 30))),
        network_faults=choices.pick((NO_FAULTS, draw_network_faults(choices))),
        incidents=(*draw_incidents(choices, others), (draw_trigger(choices), cancel_job)),
        takeovers=draw_takeovers(choices),
        is_resumed_at_end=choices.draw_boolean(50),
    )


SINGLE_JOB_KINDS: tuple[DrawScenario, ...] = (
    all_faults,
    split_brain,
    stale_caches,
    failing_job_nodes,
    operator_faults,
    lost_k8s_nodes,
    resource_faults,
    user_interference,
    preemptions,
    cancellations,
)
SHARED_CLUSTER_KINDS: tuple[DrawScenario, ...] = (
    several_jobs,
    strangers,
    paused_operators,
    two_releases,
    poisoned_jobs,
)
QUEUE_KINDS: tuple[DrawScenario, ...] = (queued_jobs, queue_preemptions, queue_pauses)
GANG_KINDS: tuple[DrawScenario, ...] = (gangs, gang_preemptions, gang_upgrades, gang_pauses)
SCENARIO_KINDS: dict[str, DrawScenario] = {
    draw.__name__: draw for draw in (*SINGLE_JOB_KINDS, *SHARED_CLUSTER_KINDS, *QUEUE_KINDS, *GANG_KINDS)
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
        spec_fields=draw_spec_fields(choices),
        network_faults=network_faults,
        incidents=draw_incidents(choices, incidents),
        takeovers=takeovers,
        is_resumed_at_end=choices.pick((True, True, True, False)),
        faults_end_seconds=choices.pick((60.0, 240.0)),
    )
