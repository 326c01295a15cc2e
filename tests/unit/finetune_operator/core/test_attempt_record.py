"""Tests of attempt records: downtime and lost steps."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence
from finetune_operator.core.attempt_record import record_downtime
from testing.builders.jobs import NOW, job

JOB = job()


def attempt_record(number: int, *, state: AttemptState = AttemptState.FAILED, **fields: Any) -> AttemptRecord:
    return AttemptRecord(attempt=number, state=state, **fields)


TRAINED = attempt_record(
    0,
    first_step=0,
    first_step_time=NOW,
    last_step=37,
    end_time=NOW + timedelta(seconds=75),
    evidence=(
        Evidence(node_rank=0, outcome="stopped", finished_at=NOW + timedelta(seconds=50)),
        Evidence(node_rank=1, outcome="failed", finished_at=NOW + timedelta(seconds=60)),
    ),
)
NEXT = attempt_record(1, state=AttemptState.RUNNING, first_step=30, first_step_time=NOW + timedelta(seconds=90))


def test_downtime_ends_at_the_first_step_of_the_next_attempt() -> None:
    (before,) = record_downtime((TRAINED,), NEXT)
    assert (before.downtime_seconds, before.steps_lost) == (30, 7)
    assert record_downtime((before,), NEXT.model_copy(update={"first_step_time": NOW + timedelta(hours=1)})) == (
        before,
    )


def test_attempts_that_never_trained_extend_the_downtime() -> None:
    untrained = attempt_record(1, end_time=NOW + timedelta(seconds=80))
    before, between = record_downtime((TRAINED, untrained), NEXT.model_copy(update={"attempt": 2}))
    assert (before.downtime_seconds, before.steps_lost) == (30, 7)
    assert between == untrained


@pytest.mark.parametrize(
    ("ended_record", "current_record"),
    [
        pytest.param(TRAINED, NEXT.model_copy(update={"first_step_time": None}), id="not training yet"),
        pytest.param(TRAINED.model_copy(update={"first_step_time": None}), NEXT, id="never trained"),
    ],
)
def test_downtime_only_includes_pauses_after_a_failure(
    ended_record: AttemptRecord, current_record: AttemptRecord
) -> None:
    assert record_downtime((ended_record,), current_record) == (ended_record,)


def test_lost_steps_are_unknown_without_a_first_step() -> None:
    (before,) = record_downtime((TRAINED,), NEXT.model_copy(update={"first_step": None}))
    assert (before.downtime_seconds, before.steps_lost) == (30, None)


def test_downtime_starts_at_the_decision_if_the_finish_time_is_missing() -> None:
    (before,) = record_downtime((TRAINED.model_copy(update={"evidence": ()}),), NEXT)
    assert before.downtime_seconds == 15


def test_steps_that_a_suspended_attempt_did_not_save_are_recorded_without_downtime() -> None:
    suspended = TRAINED.model_copy(update={"state": AttemptState.STOPPED})

    (record,) = record_downtime((suspended,), NEXT)

    assert (record.steps_lost, record.downtime_seconds) == (7, None)
