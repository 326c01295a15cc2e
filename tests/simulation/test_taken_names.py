"""Tests that a job fails if a Service that another user created already has its name."""

from collections import Counter

from testing.simulator.history import Scenario, Trigger, run_history
from testing.simulator.world.apiserver import ObjectKey
from testing.simulator.world.choices import SeededChoices
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.world import World

HISTORIES = 20


def take_service_name(world: World, job: SimulatedJob) -> None:
    """Create a Service of a stranger with the name of the job's Service."""
    metadata = {"name": job.key.name, "namespace": job.key.namespace}
    if world.server.get(ObjectKey("Service", job.key.namespace, job.key.name)) is None:
        world.server.create({"kind": "Service", "apiVersion": "v1", "metadata": metadata, "spec": {}}, actor="stranger")


def count_outcomes() -> Counter[tuple[str, ...]]:
    """Return the number of histories by the reasons of their failed attempts."""
    scenario = Scenario(incidents=((Trigger(0.0), take_service_name),))
    histories = [run_history(scenario, SeededChoices(seed)) for seed in range(HISTORIES)]
    return Counter(history.failure_reasons if not history.violations else ("violation",) for history in histories)


def test_a_job_fails_if_the_name_of_its_service_is_taken() -> None:
    outcomes = count_outcomes()

    assert set(outcomes) <= {("NameTaken",), ()}, "a Service that the job created first is its own"
    assert outcomes[("NameTaken",)] > HISTORIES / 2
