"""Tests that the pods of an attempt are never created for ConfigMaps of different releases."""

from dataclasses import replace
from datetime import timedelta

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.actions import Action, Create, DeletePod
from finetune_operator.plan.config_map import compute_config_hash
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import (
    NOW,
    SETTINGS,
    build_observation,
    command,
    decide_once,
    decide_with,
    finished_pod,
    job,
    pod,
    running_pod,
)

NEXT_RELEASE = replace(SETTINGS, supervisor="UEsDBAoK", version="2")
SCHEDULED = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW.isoformat()}]
PREVIOUS, LATEST = "", "0123456789abcdef"


def begin_job(recorded_hash: str | None = None) -> FineTuneJob:
    """Return a job with a command whose attempt 0 has begun, optionally with another recorded hash."""
    owner = job(**command({"script": "train.py"}))
    begun, _ = decide_with(owner)
    if recorded_hash is None:
        return begun
    record = begun.status.attempts[0].model_copy(update={"config_hash": recorded_hash})
    return begun.model_copy(update={"status": begun.status.model_copy(update={"attempts": (record,)})})


def list_created_names(actions: tuple[Action, ...]) -> list[str]:
    return [action.manifest["metadata"]["name"] for action in actions if isinstance(action, Create)]


def test_the_record_contains_the_hash_of_the_config_map_that_is_created() -> None:
    begun = begin_job()
    creating, creation = decide_with(begun)

    assert begun.status.attempts[0].config_hash == compute_config_hash(plan_run(begun, attempt=0, settings=SETTINGS))
    assert creating.status == begun.status
    assert list_created_names(creation.actions)[-2:] == ["bert-0-0", "bert-0-1"]


@pytest.mark.parametrize("recorded_hash", [PREVIOUS, LATEST], ids=["previous release", "another release"])
def test_an_attempt_that_another_release_began_to_create_starts_again(recorded_hash: str) -> None:
    begun = begin_job(recorded_hash)
    first_pod = running_pod(begun, 0)

    stopping, stop = decide_with(begun, first_pod)
    _, deletion = decide_with(stopping, first_pod)
    stopped, _ = decide_with(stopping)
    resumed, _ = decide_with(stopped)
    _, creation = decide_with(resumed)

    assert (stopping.status.attempts[0].state, stop.actions) == (AttemptState.STOPPING, ())
    assert "another release of the operator" in stopping.status.attempts[0].message
    assert deletion.actions == (DeletePod("bert-0-0", "pod-0-0", 120),)
    assert (resumed.status.attempt, resumed.status.restarts) == (1, 0)
    assert list_created_names(creation.actions)[-2:] == ["bert-1-0", "bert-1-1"]


def test_an_attempt_without_pods_is_created_by_the_next_release() -> None:
    begun = begin_job(PREVIOUS)

    creating, creation = decide_with(begun, settings=NEXT_RELEASE)

    assert list_created_names(creation.actions)[-2:] == ["bert-0-0", "bert-0-1"]
    run_plan = plan_run(begun, attempt=0, settings=NEXT_RELEASE)
    assert creating.status.attempts[0].config_hash == compute_config_hash(run_plan)


def test_stopping_for_another_release_requires_an_uncached_list() -> None:
    begun = begin_job(LATEST)

    _, decision = decide_with(begun, running_pod(begun, 0), is_fresh=False)

    assert decision.needs_confirmation


@pytest.mark.parametrize("recorded_hash", [PREVIOUS, LATEST, None], ids=["previous release", "another", "this"])
def test_an_attempt_with_all_pods_runs_on_after_an_upgrade(recorded_hash: str | None) -> None:
    begun = begin_job(recorded_hash)
    pods = [running_pod(begun, rank) for rank in (0, 1)]

    running, decision = decide_with(begun, *pods, settings=NEXT_RELEASE)
    ended, _ = decide_with(running, pods[0], finished_pod(running, 1))

    assert running.status.attempts[0].state is AttemptState.RUNNING
    assert list_created_names(decision.actions) == []
    assert ended.status.attempts[0].state is AttemptState.STOPPING


def test_the_config_map_of_another_release_is_not_replaced_while_pods_wait_for_their_volumes() -> None:
    begun = begin_job()
    waiting = build_observation(begun, *(pod(begun, rank, conditions=SCHEDULED) for rank in (0, 1)))
    later = NOW + timedelta(minutes=5)
    created, _ = decide_once(begun, waiting)

    _, same_release = decide_once(created, waiting, now=later)
    _, next_release = decide_once(created, waiting, now=later, settings=NEXT_RELEASE)

    assert list_created_names(same_release.actions) == ["bert-0-11111111"]
    assert list_created_names(next_release.actions) == []
