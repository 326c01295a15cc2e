"""Builders of job statuses and progress reports, and helpers that derive a status from them."""

from datetime import datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Progress
from finetune_operator.core.derive_status import StatusContext, derive_status
from finetune_operator.core.pending_reasons import PendingReason
from testing.builders.jobs import NOW, RawBody, build_observation, job

LATER = NOW + timedelta(minutes=5)
PULL = PendingReason("ImagePullFailed", "no such tag", is_image_pull_error=True)
UNSCHEDULABLE = PendingReason("Unschedulable", "1 of 2 pods cannot be placed: 0/3 nodes fit")


def build_status_with_attempts(*states: AttemptState, **last_record_fields: Any) -> JobStatus:
    """Return a status with one attempt per state; `last_record_fields` update the last attempt."""
    records = [
        AttemptRecord(attempt=number, state=state, reason="RankKilled", message="rank 3 was ended by SIGKILL")
        for number, state in enumerate(states)
    ]
    records[-1] = records[-1].model_copy(update=last_record_fields)
    return JobStatus(attempt=len(records) - 1, attempts=tuple(records), start_time=NOW)


def build_finished_status(state: AttemptState) -> JobStatus:
    """Return the status of a finished job whose only attempt ended in this state."""
    return build_status_with_attempts(state).model_copy(update={"completion_time": NOW})


def derive_later_status(
    status: JobStatus, *pods: RawBody, pending_reason: PendingReason | None = None, suspend: bool = False
) -> JobStatus:
    """Return the status that is derived five minutes after NOW."""
    ftjob = job(status=status, suspend=suspend)
    return derive_status(ftjob, StatusContext(build_observation(ftjob, *pods), pending_reason, LATER))


def get_time_after_start(seconds: int) -> datetime:
    """Return the time `seconds` after NOW, when the attempt started."""
    return NOW + timedelta(seconds=seconds)


def build_progress_report(step: int, *, seconds: int = 0, **fields: Any) -> Progress:
    """Return progress at this step, updated `seconds` after NOW."""
    return Progress(step=step, update_time=get_time_after_start(seconds), **fields)


def derive_status_with_progress(
    *pods: RawBody,
    previous_progress: Progress | None = None,
    polled_progress: Progress | None = None,
    state: AttemptState = AttemptState.RUNNING,
) -> JobStatus:
    """Return the status derived from the previous progress, the polled progress and the pods of an attempt."""
    record = AttemptRecord(attempt=0, state=state)
    status = JobStatus(attempt=0, attempts=(record,), start_time=NOW, progress=previous_progress)
    ftjob = job(status=status)
    return derive_status(ftjob, StatusContext(build_observation(ftjob, *pods, progress=polled_progress), None, NOW))
