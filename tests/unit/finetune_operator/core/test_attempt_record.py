"""Records of attempts: their step range and downtime."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, JobStatus, Progress
from finetune_operator.core.attempt_record import record_downtime, step_range
from finetune_operator.core.job_context import JobContext
from testing.builders.jobs import NOW, SETTINGS, RawBody, ended_pod, job, observation_of, running_pod

JOB = job()
RECORD = AttemptRecord(attempt=0, state=AttemptState.RUNNING, created=True)


def termination_message(outcome: Outcome = Outcome.FAILED, **fields: Any) -> str:
    return json.dumps({"final": True, "outcome": outcome, "time": NOW.timestamp(), **fields})


def context_of(*pods: RawBody, record: AttemptRecord = RECORD, polled: Progress | None = None) -> JobContext:
    """Return the context of a job whose current attempt has this record."""
    ftjob = job(status=JobStatus(attempt=0, attempts=(record,)))
    return JobContext(ftjob, observation_of(ftjob, *pods, progress=polled), NOW, SETTINGS)


def steps_of(
    *pods: RawBody, record: AttemptRecord = RECORD, polled: int | None = None
) -> tuple[int | None, int | None]:
    progress = None if polled is None else Progress(step=polled)
    record = record.model_copy(update=step_range(context_of(*pods, record=record, polled=progress)))
    return record.first_step, record.last_step


def test_steps_are_unknown_without_a_report() -> None:
    assert steps_of(running_pod(JOB, 0)) == (None, None)


def test_the_last_step_is_the_largest_reported() -> None:
    ended = ended_pod(JOB, 0, message=termination_message(firstStep=4, progress={"step": 7}))
    recorded = RECORD.model_copy(update={"first_step": 0, "last_step": 9})
    assert steps_of(ended) == (4, 7)
    assert steps_of(ended, polled=8) == (4, 8)
    assert steps_of(ended, polled=8, record=recorded) == (0, 9)


def test_the_first_step_is_the_smallest_reported() -> None:
    from_step_0, from_step_4 = (
        ended_pod(JOB, rank, message=termination_message(firstStep=step)) for rank, step in ((0, 0), (1, 4))
    )
    assert steps_of(from_step_4, from_step_0) == (0, None)


def test_polled_progress_contains_first_step_and_its_time() -> None:
    polled = Progress(step=9, first_step=4, first_step_time=NOW)

    record = RECORD.model_copy(update=step_range(context_of(running_pod(JOB, 0), polled=polled)))
    assert (record.first_step, record.first_step_time, record.last_step) == (4, NOW, 9)
    later_progress = Progress(step=12, first_step=4, first_step_time=NOW + timedelta(minutes=1))
    assert step_range(context_of(record=record, polled=later_progress))["first_step_time"] == NOW


def attempt(number: int, *, state: AttemptState = AttemptState.FAILED, **fields: Any) -> AttemptRecord:
    return AttemptRecord(attempt=number, state=state, **fields)


TRAINED = attempt(
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
NEXT = attempt(1, state=AttemptState.RUNNING, first_step=30, first_step_time=NOW + timedelta(seconds=90))


def test_downtime_lasts_from_the_failure_to_the_first_step_of_the_next_attempt() -> None:
    (before,) = record_downtime((TRAINED,), NEXT)
    assert (before.downtime_seconds, before.steps_lost) == (30, 7)
    assert record_downtime((before,), NEXT.model_copy(update={"first_step_time": NOW + timedelta(hours=1)})) == (
        before,
    )


def test_attempts_that_never_trained_extend_the_downtime() -> None:
    untrained = attempt(1, end_time=NOW + timedelta(seconds=80))
    before, between = record_downtime((TRAINED, untrained), NEXT.model_copy(update={"attempt": 2}))
    assert (before.downtime_seconds, before.steps_lost) == (30, 7)
    assert between == untrained


@pytest.mark.parametrize(
    ("ended", "record"),
    [
        pytest.param(TRAINED, NEXT.model_copy(update={"first_step_time": None}), id="not training yet"),
        pytest.param(TRAINED.model_copy(update={"state": AttemptState.STOPPED}), NEXT, id="suspended"),
        pytest.param(TRAINED.model_copy(update={"first_step_time": None}), NEXT, id="never trained"),
    ],
)
def test_other_pauses_are_no_downtime(ended: AttemptRecord, record: AttemptRecord) -> None:
    assert record_downtime((ended,), record) == (ended,)


def test_lost_steps_are_unknown_without_a_first_step() -> None:
    (before,) = record_downtime((TRAINED,), NEXT.model_copy(update={"first_step": None}))
    assert (before.downtime_seconds, before.steps_lost) == (30, None)


def test_without_a_finish_time_downtime_starts_at_the_decision() -> None:
    (before,) = record_downtime((TRAINED.model_copy(update={"evidence": ()}),), NEXT)
    assert before.downtime_seconds == 15
