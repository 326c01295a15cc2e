"""Draws several jobs of random size and priority that compete for a quota or for Kubernetes nodes."""

from collections.abc import Callable, Sequence
from typing import Any

from testing.simulator.history import JobScenario, Liveness, Scenario
from testing.simulator.incidents.job_incidents import Incident
from testing.simulator.scenario_choices import draw_incidents, draw_network_faults, draw_spec_fields
from testing.simulator.shared_cluster_scenarios import FURTHER_JOBS, GENEROUS_POLICY
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NO_FAULTS
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import WorldOptions

NO_RESTARTS = {"maxRestarts": 0, "maxInfrastructureRestarts": 0}
DrawScheduling = Callable[[Choices], dict[str, Any]]


def draw_competing_jobs(
    choices: Choices,
    incidents: Sequence[Incident],
    draw_scheduling: DrawScheduling,
    draw_options: Callable[[Sequence[JobScenario]], WorldOptions],
) -> Scenario:
    """Draw a scenario with two to four jobs.

    draw_scheduling: draws the field `scheduling` of a spec. draw_options: draws the cluster for the further jobs.
    """
    further_jobs = tuple(
        _draw_job(choices, incidents, draw_scheduling, number) for number in range(1 + choices.draw_number(3))
    )
    num_nodes = choices.pick((2, 1, 3))
    return Scenario(
        workload=Workload(num_nodes=num_nodes, total_steps=choices.pick((6, 15)), rendezvous_timeout_seconds=3600.0),
        spec_fields={**draw_spec_fields(choices), **draw_scheduling(choices)},
        network_faults=choices.pick((NO_FAULTS, draw_network_faults(choices))),
        incidents=draw_incidents(choices, incidents),
        is_resumed_at_end=choices.pick((True, True, True, False)),
        faults_end_seconds=choices.pick((60.0, 240.0)),
        further_jobs=further_jobs,
        options=draw_options(further_jobs),
    )


def draw_priority(choices: Choices, **scheduling: Any) -> dict[str, Any]:
    """Return the spec field `scheduling`, with a random priority in two thirds of the cases."""
    priority = choices.pick((None, "low", "high"))
    return {"scheduling": {**scheduling, **({"priorityClassName": priority} if priority else {})}}


def _draw_job(
    choices: Choices, incidents: Sequence[Incident], draw_scheduling: DrawScheduling, number: int
) -> JobScenario:
    """Draw a further job; about half of them have no faults of their own and must complete."""
    key, num_nodes = FURTHER_JOBS[number], choices.pick((2, 1, 3))
    if choices.draw_boolean(50):
        spec_fields = {**draw_spec_fields(choices), **draw_scheduling(choices)}
        return JobScenario(key, num_nodes, spec_fields, incidents=draw_incidents(choices, incidents))
    spec_fields = {"restartPolicy": GENEROUS_POLICY, **draw_scheduling(choices)}
    return JobScenario(key, num_nodes, spec_fields, liveness=Liveness.COMPLETES)
