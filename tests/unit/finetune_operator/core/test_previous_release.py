"""Tests that jobs stored by the previous release continue; `make test-upgrade` wrote the objects (--objects)."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, Phase
from finetune_operator.core.actions import Create
from finetune_operator.core.decide import decide
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import SETTINGS

OBJECTS = {path.stem: path for path in sorted((Path(__file__).parent / "previous_release").glob("*.json"))}
NOW = datetime(2026, 11, 25, 15, 56, tzinfo=UTC)


def parse(state: str) -> FineTuneJob:
    return FineTuneJob.parse(json.loads(OBJECTS[state].read_text()))


def test_there_is_an_object_in_each_state() -> None:
    states = {"complete", "failed", "queued", "restarting", "running", "starting", "stopping", "suspended"}
    assert set(OBJECTS) == states


@pytest.mark.parametrize("state", ["complete", "failed"])
def test_a_finished_job_stays_as_it_is(state: str) -> None:
    job = parse(state)

    assert decide(job, Observation(is_fresh=True), NOW, SETTINGS).status == job.status


@pytest.mark.parametrize("state", ["queued", "restarting", "starting", "stopping", "suspended"])
def test_no_unfinished_job_fails_or_loses_its_attempt(state: str) -> None:
    job = parse(state)

    status = decide(job, Observation(is_fresh=True), NOW, SETTINGS).status

    assert status.phase is not Phase.FAILED
    assert (status.attempt or 0) >= (job.status.attempt or 0)


def test_a_suspended_job_resumes() -> None:
    job = parse("suspended")
    resumed = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": False})})

    status = decide(resumed, Observation(is_fresh=True), NOW, SETTINGS).status
    creation = decide(resumed.model_copy(update={"status": status}), Observation(is_fresh=True), NOW, SETTINGS)

    assert (status.attempt, status.attempts[-1].state) == (1, AttemptState.STARTING)
    assert status.snapshot is not None
    assert any(isinstance(action, Create) for action in creation.actions)
