"""Kinds of histories with several jobs that share the operator, its caches and the Kubernetes nodes."""

from collections.abc import Sequence
from dataclasses import replace

from finetune_api.v1alpha1.job import GRACE_SECONDS
from testing.simulator.history import JobScenario, Liveness, Scenario
from testing.simulator.incidents.job_incidents import (
    OPERATOR_INCIDENTS,
    TRAINER_INCIDENTS,
    USER_INCIDENTS,
    Incident,
    delete_pod,
    kill_container,
    kill_rank,
    suspend_job_temporarily,
)
from testing.simulator.incidents.node_incidents import NODE_INCIDENTS
from testing.simulator.incidents.operator_pauses import OPERATOR_PAUSES
from testing.simulator.incidents.poisoned_objects import POISON
from testing.simulator.incidents.rollouts import ROLLOUTS
from testing.simulator.incidents.strangers import STRANGERS
from testing.simulator.incidents.user_interference import recreate_job
from testing.simulator.scenario_choices import draw_incidents, draw_network_faults, draw_spec_fields
from testing.simulator.world.apiserver import ObjectKey
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import JOB, MAX_NODES, SPARE_K8S_NODES, WorldOptions

# further jobs: first one of the same name in another namespace, and one whose name begins with the same characters
FURTHER_JOBS = tuple(
    JOB._replace(namespace=namespace, name=name)
    for namespace, name in (("tenant", "bert"), ("default", "bert-0"), ("default", "gpt"), ("tenant", "gpt"))
)
GENEROUS_POLICY = {"maxRestarts": 20, "maxInfrastructureRestarts": 50, "backoffSeconds": 1, "maxBackoffSeconds": 20}


def several_jobs(choices: Choices) -> Scenario:
    """Draw a scenario with two to five jobs, of which each has its own faults."""
    incidents = (*USER_INCIDENTS, *TRAINER_INCIDENTS, *NODE_INCIDENTS, *OPERATOR_INCIDENTS, *(4 * (recreate_job,)))
    return build_shared_scenario(choices, incidents)


def strangers(choices: Choices) -> Scenario:
    """Draw a scenario in which other tenants create decoys and forged objects, and slow down or reject creates."""
    incidents = (*(3 * STRANGERS), *(4 * (recreate_job, kill_rank, delete_pod)), suspend_job_temporarily)
    return build_shared_scenario(choices, incidents)


def paused_operators(choices: Choices) -> Scenario:
    """Draw a scenario in which leaders are paused for longer than a lease, or their wall clocks jump."""
    incidents = (*(2 * OPERATOR_PAUSES), *USER_INCIDENTS, *TRAINER_INCIDENTS)
    replicas = choices.pick((1, 2))
    return add_leader_election(build_shared_scenario(choices, incidents), replicas=replicas, overlaps=replicas > 1)


def two_releases(choices: Choices) -> Scenario:
    """Draw a scenario in which operators of two releases lead in turns."""
    incidents = (*(3 * ROLLOUTS), *(2 * (kill_rank, kill_container, suspend_job_temporarily)))
    scenario = build_shared_scenario(choices, incidents)
    first, *others = scenario.further_jobs
    new_job = replace(first, spec_fields={**first.spec_fields, "note": "set by a user"})
    begins_with_next_release = choices.draw_boolean(50)
    scenario = replace(scenario, further_jobs=(new_job, *others), begins_with_next_release=begins_with_next_release)
    return add_leader_election(scenario, replicas=1, overlaps=scenario.network_faults is not NO_FAULTS)


def poisoned_jobs(choices: Choices) -> Scenario:
    """Draw a scenario in which the objects of one job contain values that the operator does not expect."""
    scenario = build_shared_scenario(choices, (*TRAINER_INCIDENTS, *OPERATOR_INCIDENTS))
    poisoned_job = JobScenario(
        JOB._replace(name="poisoned"),
        num_nodes=choices.pick((2, 1)),
        spec_fields=choices.pick(({}, {"activeDeadlineSeconds": 30}, {"ttlSecondsAfterFinished": 20})),
        incidents=draw_incidents(choices, (*(3 * POISON), suspend_job_temporarily, *OPERATOR_INCIDENTS)),
        is_poisoned=True,
    )
    return replace(scenario, further_jobs=(*scenario.further_jobs, poisoned_job))


def add_leader_election(scenario: Scenario, *, replicas: int, overlaps: bool) -> Scenario:
    """Return the scenario with operators that elect a leader."""
    options = replace(scenario.options, has_leader_election=True, can_pause=True, replicas=replicas)
    settling_seconds = GRACE_SECONDS + 30.0  # no Kubernetes node is lost, and each renewal of the lease takes time
    return replace(scenario, options=options, settling_seconds=settling_seconds, has_overlapping_operators=overlaps)


def build_shared_scenario(choices: Choices, incidents: Sequence[Incident]) -> Scenario:
    """Draw a scenario with several jobs; about half of them have no faults of their own and must complete."""
    further_jobs = tuple(_draw_job(choices, key, incidents) for key in FURTHER_JOBS[: 1 + choices.draw_number(4)])
    num_nodes = choices.pick((2, 1, 3))
    return Scenario(
        workload=Workload(num_nodes=num_nodes, total_steps=choices.pick((6, 15)), rendezvous_timeout_seconds=3600.0),
        spec_fields=draw_spec_fields(choices),
        network_faults=choices.pick((NO_FAULTS, draw_network_faults(choices))),
        incidents=draw_incidents(choices, incidents),
        is_resumed_at_end=choices.pick((True, True, True, False)),
        faults_end_seconds=choices.pick((60.0, 240.0)),
        further_jobs=further_jobs,
        options=WorldOptions(
            k8s_nodes=SPARE_K8S_NODES + MAX_NODES + sum(job.num_nodes for job in further_jobs), workers=4
        ),
    )


def _draw_job(choices: Choices, key: ObjectKey, incidents: Sequence[Incident]) -> JobScenario:
    if choices.draw_boolean(50):
        return JobScenario(
            key,
            num_nodes=choices.pick((2, 1, 3)),
            spec_fields=draw_spec_fields(choices),
            incidents=draw_incidents(choices, incidents),
        )
    return JobScenario(
        key,
        num_nodes=choices.pick((2, 1, 3)),
        spec_fields={"restartPolicy": GENEROUS_POLICY},
        liveness=Liveness.COMPLETES,
    )
