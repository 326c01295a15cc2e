"""Tests that a job fails if a Service that another user created already has its name."""

from collections import Counter
from dataclasses import replace

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.controller import reconcile
from finetune_operator.controller.gather import CachedState
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


def test_ignoring_the_rejected_service_once_all_pods_exist_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find_known_creation = reconcile._with_known_creation

    def ignore_rejections(job: FineTuneJob, cached: CachedState) -> FineTuneJob:
        return find_known_creation(job, replace(cached, rejected_creates=()))

    monkeypatch.setattr(reconcile, find_known_creation.__name__, ignore_rejections)

    assert count_outcomes()[("NameTaken",)] <= HISTORIES / 2
