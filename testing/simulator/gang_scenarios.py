"""Kinds of histories in which several jobs start as gangs, and compete for Kubernetes nodes that suffice for a few."""

from collections.abc import Sequence
from dataclasses import replace

from testing.simulator.competing_jobs import NO_RESTARTS, draw_competing_jobs, draw_priority
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
from testing.simulator.scenario_choices import draw_incidents, draw_takeovers
from testing.simulator.shared_cluster_scenarios import GENEROUS_POLICY, add_leader_election
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS
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
    def draw_options(_further_jobs: Sequence[JobScenario]) -> WorldOptions:
        k8s_nodes = SPARE_K8S_NODES + MAX_NODES + choices.draw_number(3)
        return WorldOptions(k8s_nodes=k8s_nodes, workers=4, has_pod_groups=True)

    return draw_competing_jobs(choices, incidents, draw_priority, draw_options)


def _let_all_jobs_complete(
    choices: Choices, incidents: Sequence[Incident], policy: dict[str, int], *, has_operator_faults: bool
) -> Scenario:
    """Draw a scenario in which every job has these incidents and this restart policy, and must complete."""
    scenario = _build_gang_scenario(choices, incidents)
    further_jobs = tuple(
        replace(
            job,
            spec_fields={"restartPolicy": policy, **draw_priority(choices)},
            incidents=draw_incidents(choices, incidents),
            liveness=Liveness.COMPLETES,
        )
        for job in scenario.further_jobs
    )
    return replace(
        scenario,
        network_faults=scenario.network_faults if has_operator_faults else NO_FAULTS,
        spec_fields={"restartPolicy": policy, **draw_priority(choices)},
        is_resumed_at_end=True,
        liveness=Liveness.COMPLETES,
        further_jobs=further_jobs,
    )
