"""Kinds of histories in which several jobs share a small quota of Kueue."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testing.simulator.competing_jobs import NO_RESTARTS, draw_competing_jobs, draw_priority
from testing.simulator.history import JobScenario, Liveness, Scenario
from testing.simulator.incidents.job_incidents import (
    OPERATOR_INCIDENTS,
    TRAINER_INCIDENTS,
    USER_INCIDENTS,
    Incident,
    cancel_job,
    edit_job_under_brief_suspension,
    replace_config_map,
    suspend_job_temporarily,
    take_pod_name,
)
from testing.simulator.incidents.node_incidents import NODE_INCIDENTS
from testing.simulator.incidents.operator_pauses import OPERATOR_PAUSES
from testing.simulator.incidents.poisoned_objects import POISON
from testing.simulator.incidents.queue_incidents import PREEMPTIONS, QUEUE_INCIDENTS
from testing.simulator.incidents.user_interference import exhaust_quota, recreate_job
from testing.simulator.scenario_choices import draw_incidents, draw_takeovers
from testing.simulator.shared_cluster_scenarios import GENEROUS_POLICY, add_leader_election
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS
from testing.simulator.world.world import JOB, MAX_NODES, SPARE_K8S_NODES, WorldOptions

# without those that make a job wait for a name in use forever, while it holds its quota
USER_INCIDENTS_IN_QUEUES = (
    *(incident for incident in USER_INCIDENTS if incident not in (take_pod_name, replace_config_map)),
    *(2 * (cancel_job, recreate_job, edit_job_under_brief_suspension)),
    exhaust_quota,
)


def queued_jobs(choices: Choices) -> Scenario:
    """Draw a scenario with faults of all kinds, in which up to four jobs of random priority share a quota."""
    incidents = (*USER_INCIDENTS_IN_QUEUES, *TRAINER_INCIDENTS, *NODE_INCIDENTS, *OPERATOR_INCIDENTS)
    scenario = _build_queue_scenario(choices, (*incidents, *(4 * QUEUE_INCIDENTS)))
    scenario = replace(scenario, takeovers=choices.pick(((), draw_takeovers(choices))))
    return _add_poisoned_job(choices, scenario) if choices.draw_boolean(20) else scenario


def queue_preemptions(choices: Choices) -> Scenario:
    """Draw a scenario in which Workloads are preempted and deactivated, in half of the cases while operators fail.

    The jobs must complete. They have no restart budget, unless operators fail: Kueue removes the pods of a preempted
    group that succeeds, so that an operator that starts later does not know how they ended.
    """
    has_operator_faults = choices.draw_boolean(50)
    incidents = (*(3 * PREEMPTIONS), *(OPERATOR_INCIDENTS if has_operator_faults else ()))
    scenario = _build_queue_scenario(choices, incidents)
    fields = {"restartPolicy": GENEROUS_POLICY if has_operator_faults else NO_RESTARTS}
    return replace(
        scenario,
        network_faults=scenario.network_faults if has_operator_faults else NO_FAULTS,
        spec_fields={**fields, **_draw_scheduling(choices)},
        liveness=Liveness.COMPLETES,
        further_jobs=tuple(
            replace(
                job,
                spec_fields={**fields, **_draw_scheduling(choices)},
                incidents=draw_incidents(choices, incidents),
                liveness=Liveness.COMPLETES,
            )
            for job in scenario.further_jobs
        ),
    )


def queue_pauses(choices: Choices) -> Scenario:
    """Draw a scenario in which leaders are paused or crash while jobs of a queue start, stop and end."""
    incidents = (*(2 * OPERATOR_PAUSES), *QUEUE_INCIDENTS, *USER_INCIDENTS_IN_QUEUES, *TRAINER_INCIDENTS)
    replicas = choices.pick((1, 2))
    scenario = _build_queue_scenario(choices, (*incidents, *(2 * (suspend_job_temporarily,))))
    return add_leader_election(scenario, replicas=replicas, overlaps=replicas > 1)


def _build_queue_scenario(choices: Choices, incidents: Sequence[Incident]) -> Scenario:
    def draw_options(further_jobs: Sequence[JobScenario]) -> WorldOptions:
        return WorldOptions(
            k8s_nodes=SPARE_K8S_NODES + MAX_NODES + sum(job.num_nodes for job in further_jobs),
            workers=4,
            queue_quota=choices.pick((3, 4, 6)),
        )

    return draw_competing_jobs(choices, incidents, _draw_scheduling, draw_options)


def _add_poisoned_job(choices: Choices, scenario: Scenario) -> Scenario:
    """Add a job whose objects contain values that the operator does not expect."""
    incidents = draw_incidents(choices, (*POISON, suspend_job_temporarily))
    job = JobScenario(
        JOB._replace(name="poisoned"), 1, _draw_scheduling(choices), incidents=incidents, is_poisoned=True
    )
    return replace(scenario, further_jobs=(*scenario.further_jobs, job))


def _draw_scheduling(choices: Choices) -> dict[str, Any]:
    return draw_priority(choices, queueName="gpus")
