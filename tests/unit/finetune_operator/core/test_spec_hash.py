"""Tests that an attempt is stopped if its spec was changed while nobody observed the suspension."""

from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.actions import Create, DeletePod
from finetune_operator.core.spec_hash import compute_spec_hash, has_outdated_spec
from testing.builders.jobs import decide_with, job, running_pod

CHANGES: tuple[dict[str, Any], ...] = (
    {"nprocPerNode": 2, "resources": {"limits": {"cpu": "3"}}},
    {"image": "registry.example/trainer:other"},
    {"network": {"masterPort": 29600}},
    {"podTemplate": {"nodeSelector": {"zone": "b"}}},
    {"shmSize": "1Gi"},
)


def start_attempt(owner: FineTuneJob) -> FineTuneJob:
    """Return the job with both pods running."""
    begun, _ = decide_with(owner)
    running, _ = decide_with(begun, *(running_pod(begun, rank) for rank in (0, 1)))
    assert running.status.attempts[-1].state is AttemptState.RUNNING
    return running


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(reversed(change)))
def test_an_unobserved_change_stops_the_attempt_and_starts_one_with_the_new_spec(change: dict[str, Any]) -> None:
    owner = start_attempt(job())
    changed = job(**change).model_copy(update={"status": owner.status})
    pods = [running_pod(changed, rank) for rank in (0, 1)]

    stopping, _ = decide_with(changed, *pods)
    _, deletion = decide_with(stopping, *pods)
    stopped, _ = decide_with(stopping)
    resumed, _ = decide_with(stopped)
    _, creation = decide_with(resumed)

    assert "the spec was changed" in stopping.status.attempts[-1].message
    assert [type(action) for action in deletion.actions] == [DeletePod, DeletePod]
    assert stopped.status.attempts[-1].state is AttemptState.STOPPED
    assert (resumed.status.attempt, resumed.status.restarts) == (1, 0)
    assert not has_outdated_spec(resumed.status.attempts[-1], changed.spec)
    assert any(isinstance(action, Create) for action in creation.actions)


def test_fields_that_can_be_changed_at_any_time_do_not_stop_the_attempt() -> None:
    owner = start_attempt(job())
    changed = job(restartPolicy={"maxRestarts": 9}, activeDeadlineSeconds=99, ttlSecondsAfterFinished=9)
    changed = changed.model_copy(update={"status": owner.status})

    after, _ = decide_with(changed, *(running_pod(changed, rank) for rank in (0, 1)))

    assert after.status.attempts[-1].state is AttemptState.RUNNING


@pytest.mark.parametrize("recorded_hash", ["", "00000000-0123456789abcdef"], ids=["none", "another release"])
def test_a_hash_of_another_release_is_replaced_without_a_restart(recorded_hash: str) -> None:
    owner = start_attempt(job())
    record = owner.status.attempts[-1].model_copy(update={"spec_hash": recorded_hash})
    upgraded = owner.model_copy(update={"status": owner.status.model_copy(update={"attempts": (record,)})})

    after, _ = decide_with(upgraded, *(running_pod(upgraded, rank) for rank in (0, 1)))

    assert after.status.attempts[-1].state is AttemptState.RUNNING
    assert after.status.attempts[-1].spec_hash == compute_spec_hash(owner.spec)
