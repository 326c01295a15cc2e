"""Kinds of histories in which several jobs start as gangs, and compete for Kubernetes nodes that suffice for a few."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testing.simulator.history import JobScenario, Liveness, Scenario, Trigger
from testing.simulator.incidents.gang_incidents import GANG_INCIDENTS, UPGRADES, preempt_gang
from testing.simulator.incidents.job_incidents import (
    OPERATOR_INCIDENTS,
    TRAINER_INCIDENTS,
    USER_INCIDENTS,
    Incident,
    cancel_job,
    delete_pod,
    edit_job_under_brief_suspension,
    kill_rank,
    suspend_job_temporarily,
)
from testing.simulator.incidents.node_incidents import NODE_INCIDENTS
from testing.simulator.incidents.operator_pauses import OPERATOR_PAUSES
from testing.simulator.incidents.user_interference import exhaust_quota, recreate_job
from testing.simulator.queue_scenarios import NO_RESTARTS
from testing.simulator.scenario_choices import draw_incidents, draw_network_faults, draw_spec_fields, draw_takeovers
from testing.simulator.shared_cluster_scenarios import FURTHER_JOBS, GENEROUS_POLICY, add_leader_election
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import MAX_NODES, SPARE_K8S_NODES, WorldOptions

USER_INCIDENTS_OF_GANGS = (
    *USER_INCIDENTS,
    *(2 * (cancel_job, recreate_job, edit_job_under_brief_suspension)),
    exhaust_quota,
)
AT_START = Trigger(seconds=0.0)


def gangs(choices: Choices) -> Scenario:
    """Draw a scenario with faults of all kinds, in which up to four gangs of random priority share a few nodes."""
    incidents = (*USER_INCIDENTS_OF_GANGS, *TRAINER_INCIDENTS, *NODE_INCIDENTS, *OPERATOR_INCIDENTS)
    scenario = _build_gang_scenario(choices, (*incidents, *(3 * GANG_INCIDENTS)))
    return replace(scenario, takeovers=choices.pick(((), draw_takeovers(choices))))


def gang_preemptions(choices: Choices) -> Scenario:
    """Draw a scenario in which gangs are preempted, in half of the cases while operators fail; the jobs must complete.

    They have no restart budget, unless operators fail and miss the conditions of removed pods.
    """
    has_operator_faults = choices.draw_boolean(50)
    incidents = (*(3 * (preempt_gang,)), *(OPERATOR_INCIDENTS if has_operator_faults else ()))
    policy = GENEROUS_POLICY if has_operator_faults else NO_RESTARTS
    return _let_all_jobs_complete(choices, incidents, policy, has_operator_faults=has_operator_faults)


def gang_upgrades(choices: Choices) -> Scenario:
    """Draw a scenario in which the cluster temporarily has no PodGroups, often from the start; jobs must complete."""
    incidents = (*(3 * UPGRADES), *(2 * (kill_rank, delete_pod)), suspend_job_temporarily, *OPERATOR_INCIDENTS)
    scenario = _let_all_jobs_complete(choices, incidents, GENEROUS_POLICY, has_operator_faults=choices.draw_boolean(50))
    first = choices.pick(((), *(((AT_START, upgrade),) for upgrade in UPGRADES)))
    return replace(scenario, incidents=(*first, *scenario.incidents))


def gang_pauses(choices: Choices) -> Scenario:
    """Draw a scenario in which leaders are paused or crash while gangs start, stop and end."""
    incidents = (*(2 * OPERATOR_PAUSES), *GANG_INCIDENTS, *USER_INCIDENTS_OF_GANGS, *TRAINER_INCIDENTS)
    replicas = choices.pick((1, 2))
    scenario = _build_gang_scenario(choices, (*incidents, *(2 * (suspend_job_temporarily,))))
    return add_leader_election(scenario, replicas=replicas, overlaps=replicas > 1)


def _build_gang_scenario(choices: Choices, incidents: Sequence[Incident]) -> Scenario:
    further_jobs = tuple(_draw_job(choices, incidents, number) for number in range(1 + choices.draw_number(3)))
    num_nodes = choices.pick((2, 1, 3))
    return Scenario(
        workload=Workload(num_nodes=num_nodes, total_steps=choices.pick((6, 15)), rendezvous_timeout_seconds=3600.0),
        spec_fields={**draw_spec_fields(choices), **_draw_scheduling(choices)},
        network_faults=choices.pick((NO_FAULTS, draw_network_faults(choices))),
        incidents=draw_incidents(choices, incidents),
        is_resumed_at_end=choices.pick((True, True, True, False)),
        faults_end_seconds=choices.pick((60.0, 240.0)),
        further_jobs=further_jobs,
        options=WorldOptions(
            k8s_nodes=SPARE_K8S_NODES + MAX_NODES + choices.draw_number(3), workers=4, has_pod_groups=True
        ),
    )


def _let_all_jobs_complete(
    choices: Choices, incidents: Sequence[Incident], policy: dict[str, int], *, has_operator_faults: bool
) -> Scenario:
    """Draw a scenario in which every job has these incidents and this restart policy, and must complete."""
    scenario = _build_gang_scenario(choices, incidents)
    further_jobs = tuple(
        replace(
            job,
            spec_fields={"restartPolicy": policy, **_draw_scheduling(choices)},
            incidents=draw_incidents(choices, incidents),
            liveness=Liveness.COMPLETES,
        )
        for job in scenario.further_jobs
    )
    return replace(
        scenario,
        network_faults=scenario.network_faults if has_operator_faults else NO_FAULTS,
        spec_fields={"restartPolicy": policy, **_draw_scheduling(choices)},
        is_resumed_at_end=True,
        liveness=Liveness.COMPLETES,
        further_jobs=further_jobs,
    )


def _draw_job(choices: Choices, incidents: Sequence[Incident], number: int) -> JobScenario:
    """Draw a further job; about half of them have no faults of their own and must complete."""
    key, num_nodes = FURTHER_JOBS[number], choices.pick((2, 1, 3))
    if choices.draw_boolean(50):
        spec_fields = {**draw_spec_fields(choices), **_draw_scheduling(choices)}
        return JobScenario(key, num_nodes, spec_fields, incidents=draw_incidents(choices, incidents))
    spec_fields = {"restartPolicy": GENEROUS_POLICY, **_draw_scheduling(choices)}
    return JobScenario(key, num_nodes, spec_fields, liveness=Liveness.COMPLETES)


def _draw_scheduling(choices: Choices) -> dict[str, Any]:
    priority = choices.pick((None, "low", "high"))
    return {"scheduling": {"priorityClassName": priority} if priority else {}}
