"""Tests of the progress, the steps and the batch in the status."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.repair import Repair
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Progress
from finetune_operator.core.derive_status import StatusContext, derive_status
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.progress import summarise_steps
from finetune_supervisor.messages import to_json_object
from testing.builders.jobs import NOW, SETTINGS, RawBody, build_observation, finished_pod, job, running_pod
from testing.builders.statuses import build_progress_report, derive_status_with_progress, get_time_after_start

JOB = job()
RECORD = AttemptRecord(attempt=0, state=AttemptState.RUNNING, created=True)


def terminated_pod_with_progress(progress: Progress, *, node_rank: int = 0) -> RawBody:
    message = {"final": True, "outcome": "failed", "progress": to_json_object(progress)}
    return finished_pod(JOB, node_rank, message=json.dumps(message))


at = build_progress_report


@pytest.mark.parametrize(
    ("final", "polled", "previous", "expected"),
    [
        pytest.param(None, at(5), None, at(5), id="a poll is copied"),
        pytest.param(None, None, at(5), at(5), id="kept without a new report"),
        pytest.param(None, None, None, None, id="no report"),
        pytest.param(None, at(5), at(9, seconds=60), at(9, seconds=60), id="an older report replaces no newer one"),
        pytest.param(None, at(8, seconds=60), at(9), at(8, seconds=60), id="earlier step after a resumption"),
        pytest.param(
            at(12, seconds=2), at(11, seconds=1), None, at(12, seconds=2), id="the termination message is newer"
        ),
        pytest.param(
            None,
            at(0, seconds=1),
            at(9, model_revision="5eed"),
            at(0, seconds=1, model_revision="5eed"),
            id="the commit of the model is kept",
        ),
    ],
)
def test_progress_is_the_newest_report(
    final: Progress | None, polled: Progress | None, previous: Progress | None, expected: Progress | None
) -> None:
    pods = () if final is None else (terminated_pod_with_progress(final),)
    assert derive_status_with_progress(*pods, polled_progress=polled, previous_progress=previous).progress == expected


def test_only_node_0_reports_progress() -> None:
    assert derive_status_with_progress(terminated_pod_with_progress(at(12), node_rank=1)).progress is None


def test_the_termination_message_replaces_a_forged_poll() -> None:
    forged, final = build_progress_report(10**9, seconds=10**6), build_progress_report(12, seconds=2)
    progress = derive_status_with_progress(
        terminated_pod_with_progress(final), previous_progress=forged, polled_progress=forged
    ).progress
    assert progress == final


def test_report_without_a_checkpoint_keeps_the_last_checkpoint() -> None:
    before = build_progress_report(9, last_checkpoint="step-8")
    progress = derive_status_with_progress(
        previous_progress=before, polled_progress=build_progress_report(10, seconds=1)
    ).progress
    assert progress == build_progress_report(10, seconds=1, last_checkpoint="step-8")
    newer = derive_status_with_progress(
        previous_progress=before, polled_progress=build_progress_report(17, seconds=1, last_checkpoint="step-16")
    ).progress
    assert newer is not None
    assert newer.last_checkpoint == "step-16"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1))
def test_the_update_time_of_progress_never_decreases(polls: list[tuple[int, int]]) -> None:
    current: Progress | None = None
    for step, seconds in polls:
        before, current = (
            current,
            derive_status_with_progress(
                previous_progress=current, polled_progress=build_progress_report(step, seconds=seconds)
            ).progress,
        )
        assert current is not None
        assert current.update_time is not None
        assert current.update_time >= get_time_after_start(seconds)
        if before is not None and before.update_time is not None:
            assert current.update_time >= before.update_time


def test_status_contains_the_batch_and_the_output() -> None:
    status = derive_status_with_progress()
    assert status.batch is not None
    assert (status.batch.effective, status.batch.world_size) == (4, 4)
    assert status.output == "models:default/bert"
    claim = {"persistentVolumeClaim": {"claimName": "models"}, "subPath": "team/a"}
    assert derive_status(job(output=claim), StatusContext(build_observation(JOB), None, NOW)).output == "models:team/a"


AUTO = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32}


def derive_status_and_batch(
    ftjob: FineTuneJob, *pods: RawBody, polled_progress: Progress | None = None
) -> tuple[JobStatus, str]:
    """Return the derived status and its batch, formatted as `per device x accumulation x world size`."""
    status = derive_status(ftjob, StatusContext(build_observation(ftjob, *pods, progress=polled_progress), None, NOW))
    batch = status.batch
    if batch is None:
        return status, "unknown"
    return status, f"{batch.per_device_train_batch_size} x {batch.gradient_accumulation_steps} x {batch.world_size}"


def test_batch_chosen_by_the_trainer_is_kept_in_the_status() -> None:
    ftjob = job(
        status=JobStatus(attempt=0, attempts=(AttemptRecord(attempt=0, state=AttemptState.RUNNING),)), training=AUTO
    )
    before, unknown = derive_status_and_batch(ftjob, polled_progress=build_progress_report(0))
    chosen, current = derive_status_and_batch(
        ftjob, polled_progress=build_progress_report(0, per_device_train_batch_size=4)
    )
    _, later = derive_status_and_batch(ftjob.model_copy(update={"status": chosen}))

    assert (before.batch, unknown) == (None, "unknown")
    assert current == later == "4 x 2 x 4"


@pytest.mark.parametrize("size", [0, -4, 3, 64])
def test_invalid_micro_batch_size_is_ignored(size: int) -> None:
    ftjob = job(
        status=JobStatus(attempt=0, attempts=(AttemptRecord(attempt=0, state=AttemptState.RUNNING),)), training=AUTO
    )

    assert (
        derive_status_and_batch(ftjob, polled_progress=build_progress_report(0, per_device_train_batch_size=size))[1]
        == "unknown"
    )


def test_reported_micro_batch_size_does_not_override_the_spec() -> None:
    ftjob = job(training={"perDeviceTrainBatchSize": 2, "gradientAccumulationSteps": 4})

    assert (
        derive_status_and_batch(ftjob, polled_progress=build_progress_report(0, per_device_train_batch_size=8))[1]
        == "2 x 4 x 4"
    )


def test_repair_overrides_an_automatic_micro_batch_size() -> None:
    repair = Repair(per_device_train_batch_size=1, gradient_accumulation_steps=8)
    ftjob = job(status=JobStatus(repair=repair), training=AUTO)

    assert (
        derive_status_and_batch(ftjob, polled_progress=build_progress_report(0, per_device_train_batch_size=4))[1]
        == "1 x 8 x 4"
    )


def termination_message(outcome: Outcome = Outcome.FAILED, **fields: Any) -> str:
    return json.dumps({"final": True, "outcome": outcome, "time": NOW.timestamp(), **fields})


def build_context(
    *pods: RawBody, record: AttemptRecord = RECORD, polled_progress: Progress | None = None
) -> JobContext:
    """Return the context of a job whose current attempt has this record."""
    ftjob = job(status=JobStatus(attempt=0, attempts=(record,)))
    return JobContext(ftjob, build_observation(ftjob, *pods, progress=polled_progress), NOW, SETTINGS)


def derive_steps(
    *pods: RawBody, record: AttemptRecord = RECORD, polled_progress: int | None = None
) -> tuple[int | None, int | None]:
    progress = None if polled_progress is None else Progress(step=polled_progress)
    record = record.model_copy(update=summarise_steps(build_context(*pods, record=record, polled_progress=progress)))
    return record.first_step, record.last_step


def test_steps_are_unknown_without_a_report() -> None:
    assert derive_steps(running_pod(JOB, 0)) == (None, None)


def test_last_step_is_the_largest_reported_step() -> None:
    ended = finished_pod(JOB, 0, message=termination_message(firstStep=4, progress={"step": 7}))
    recorded = RECORD.model_copy(update={"first_step": 0, "last_step": 9})
    assert derive_steps(ended) == (4, 7)
    assert derive_steps(ended, polled_progress=8) == (4, 8)
    assert derive_steps(ended, polled_progress=8, record=recorded) == (0, 9)


def test_first_step_is_the_smallest_reported_step() -> None:
    from_step_0, from_step_4 = (
        finished_pod(JOB, rank, message=termination_message(firstStep=step)) for rank, step in ((0, 0), (1, 4))
    )
    assert derive_steps(from_step_4, from_step_0) == (0, None)


def test_polled_progress_contains_the_first_step_and_its_time() -> None:
    polled = Progress(step=9, first_step=4, first_step_time=NOW)

    record = RECORD.model_copy(update=summarise_steps(build_context(running_pod(JOB, 0), polled_progress=polled)))
    assert (record.first_step, record.first_step_time, record.last_step) == (4, NOW, 9)
    later_progress = Progress(step=12, first_step=4, first_step_time=NOW + timedelta(minutes=1))
    assert summarise_steps(build_context(record=record, polled_progress=later_progress))["first_step_time"] == NOW
