"""How far training is: whose report counts, and the columns of `kubectl get`."""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Display, JobStatus, Progress, Repair
from finetune_operator.core.conditions import Told, short_duration, short_number, tell
from testing.builders.jobs import NOW, Raw, deleting, ended, job, pod, running, seen

OF = job()


def at(seconds: int) -> datetime:
    return NOW + timedelta(seconds=seconds)


def report(step: int, *, seconds: int = 0, **fields: Any) -> Progress:
    return Progress(step=step, update_time=at(seconds), **fields)


def last_words(progress: Progress, *, node_rank: int = 0) -> Raw:
    said = {"final": True, "outcome": "failed", "progress": progress.model_dump(mode="json", by_alias=True)}
    return ended(OF, node_rank, message=json.dumps(said))


def told(
    *pods: Raw,
    before: Progress | None = None,
    polled: Progress | None = None,
    state: AttemptState = AttemptState.RUNNING,
) -> JobStatus:
    record = AttemptRecord(attempt=0, state=state)
    status = JobStatus(attempt=0, attempts=(record,), start_time=NOW, progress=before)
    of = job(status=status)
    return tell(of, Told(seen(of, *pods, progress=polled), None, NOW))


def columns(*pods: Raw, **fields: Any) -> Display:
    display = told(*pods, **fields).display
    assert display is not None
    return display


def test_what_was_polled_is_told() -> None:
    assert told(polled=report(5)).progress == report(5)


def test_what_is_known_stays_while_nobody_reports() -> None:
    assert told(before=report(5)).progress == report(5)
    assert told().progress is None


def test_an_older_report_does_not_replace_a_newer() -> None:
    assert told(before=report(9, seconds=60), polled=report(5)).progress == report(9, seconds=60)


def test_an_attempt_that_resumes_from_a_checkpoint_reports_fewer_steps() -> None:
    assert told(before=report(9), polled=report(8, seconds=60)).progress == report(8, seconds=60)


def test_last_words_are_newer_than_what_was_polled() -> None:
    progress = told(last_words(report(12, seconds=2)), polled=report(11, seconds=1)).progress
    assert progress == report(12, seconds=2)


def test_only_rank_zero_knows_how_far_training_is() -> None:
    assert told(last_words(report(12), node_rank=1)).progress is None


def test_a_checkpoint_is_not_forgotten_by_a_report_without_one() -> None:
    before = report(9, last_checkpoint="step-8")
    progress = told(before=before, polled=report(10, seconds=1)).progress
    assert progress == report(10, seconds=1, last_checkpoint="step-8")
    newer = told(before=before, polled=report(17, seconds=1, last_checkpoint="step-16")).progress
    assert newer is not None
    assert newer.last_checkpoint == "step-16"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1))
def test_progress_never_goes_back_in_time(polls: list[tuple[int, int]]) -> None:
    known: Progress | None = None
    for step, seconds in polls:
        before, known = known, told(before=known, polled=report(step, seconds=seconds)).progress
        assert known is not None
        assert known.update_time is not None
        assert known.update_time >= at(seconds)
        if before is not None and before.update_time is not None:
            assert known.update_time >= before.update_time


def test_a_running_job_shows_how_far_how_fast_and_how_long_yet() -> None:
    full = report(40, total_steps=120, loss=1.23456, tokens_per_second=18432.0, eta_seconds=1320)
    assert columns(running(OF, 0), running(OF, 1), polled=full) == Display(
        nodes="2/2", progress="33% 40/120", loss="1.235", tokens_per_second="18.4k", eta="22m"
    )


def test_a_job_that_does_not_run_shows_no_pace() -> None:
    full = report(40, total_steps=120, loss=1.0, tokens_per_second=18432.0, eta_seconds=1320)
    assert columns(before=full, state=AttemptState.STOPPING) == Display(
        nodes="0/2", progress="33% 40/120", loss="1.000"
    )


def test_a_job_that_stopped_early_shows_its_last_step_and_no_percentage() -> None:
    full = report(40, total_steps=120, loss=1.0, stopped_early=True)
    assert columns(before=full, state=AttemptState.SUCCEEDED).progress == "stopped early 40/120"


def test_what_is_not_known_is_left_blank() -> None:
    assert columns(polled=report(0)) == columns() == Display(nodes="0/2")


def test_nodes_count_while_they_run_and_nobody_stops_them() -> None:
    assert columns(running(OF, 0), pod(OF, 1)).nodes == "1/2"
    assert columns(running(OF, 0), deleting(running(OF, 1))).nodes == "1/2"


def test_the_status_names_the_batch_and_where_the_result_goes() -> None:
    status = told()
    assert status.batch is not None
    assert (status.batch.effective, status.batch.world_size) == (4, 4)
    assert status.output == "models:default/bert"
    claim = {"persistentVolumeClaim": {"claimName": "models"}, "subPath": "team/a"}
    assert tell(job(output=claim), Told(seen(OF), None, NOW)).output == "models:team/a"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (18432, "18.4k"), (2.5e6, "2.5M"), (7e9, "7.0G"), (12.4, "12")],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short_number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (1320, "22m"),
        (7199, "119m"),
        (7200, "2h0m"),
        (172_799, "47h59m"),
        (172_800, "2d"),
    ],
)
def test_durations_are_written_as_kubectl_writes_ages(seconds: int, text: str) -> None:
    assert short_duration(seconds) == text


AUTO = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32}


def batch_of(of: FineTuneJob, *pods: Raw, polled: Progress | None = None) -> tuple[JobStatus, str]:
    """What is told, and the batch as a product."""
    status = tell(of, Told(seen(of, *pods, progress=polled), None, NOW))
    batch = status.batch
    if batch is None:
        return status, "unknown"
    return status, f"{batch.per_device_train_batch_size} x {batch.gradient_accumulation_steps} x {batch.world_size}"


def test_what_auto_came_to_is_told_once_the_trainer_says_it_and_not_forgotten() -> None:
    of = job(
        status=JobStatus(attempt=0, attempts=(AttemptRecord(attempt=0, state=AttemptState.RUNNING),)), training=AUTO
    )
    before, unknown = batch_of(of, polled=report(0))
    chosen, known = batch_of(of, polled=report(0, per_device_train_batch_size=4))
    _, later = batch_of(of.model_copy(update={"status": chosen}))

    assert (before.batch, unknown) == (None, "unknown")
    assert known == later == "4 x 2 x 4"


@pytest.mark.parametrize("size", [0, -4, 3, 64])
def test_a_size_that_cannot_have_been_chosen_is_not_believed(size: int) -> None:
    of = job(
        status=JobStatus(attempt=0, attempts=(AttemptRecord(attempt=0, state=AttemptState.RUNNING),)), training=AUTO
    )

    assert batch_of(of, polled=report(0, per_device_train_batch_size=size))[1] == "unknown"


def test_a_size_that_the_spec_says_is_not_taken_from_a_report() -> None:
    of = job(training={"perDeviceTrainBatchSize": 2, "gradientAccumulationSteps": 4})

    assert batch_of(of, polled=report(0, per_device_train_batch_size=8))[1] == "2 x 4 x 4"


def test_a_repair_stands_in_the_place_of_auto() -> None:
    repair = Repair(per_device_train_batch_size=1, gradient_accumulation_steps=8)
    of = job(status=JobStatus(repair=repair), training=AUTO)

    assert batch_of(of, polled=report(0, per_device_train_batch_size=4))[1] == "1 x 8 x 4"
