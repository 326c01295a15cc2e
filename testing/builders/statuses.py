"""Statuses of jobs in every state, and statuses derived from them."""

from datetime import datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Progress
from finetune_operator.core.derive_status import StatusContext, derive_status
from finetune_operator.core.pending_reasons import PendingReason
from testing.builders.jobs import NOW, RawBody, job, observation_of

LATER = NOW + timedelta(minutes=5)
PULL = PendingReason("ImagePullFailed", "no such tag", image_pull=True)
UNSCHEDULABLE = PendingReason("Unschedulable", "1 of 2 pods cannot be placed: 0/3 nodes fit")


def status_with_attempts(*states: AttemptState, **last: Any) -> JobStatus:
    """Return a status with an attempt in each of these states; `last` updates the last one."""
    records = [
        AttemptRecord(attempt=number, state=state, reason="RankKilled", message="rank 3 was ended by SIGKILL")
        for number, state in enumerate(states)
    ]
    records[-1] = records[-1].model_copy(update=last)
    return JobStatus(attempt=len(records) - 1, attempts=tuple(records), start_time=NOW)


def finished(state: AttemptState) -> JobStatus:
    """Return the status of a job whose only attempt ended in this state."""
    return status_with_attempts(state).model_copy(update={"completion_time": NOW})


def status_of(
    status: JobStatus, *pods: RawBody, pending_reason: PendingReason | None = None, suspend: bool = False
) -> JobStatus:
    """Return the derived status five minutes after NOW."""
    ftjob = job(status=status, suspend=suspend)
    return derive_status(ftjob, StatusContext(observation_of(ftjob, *pods), pending_reason, LATER))


def seconds_after_start(seconds: int) -> datetime:
    """Return a time after NOW, when the attempt started."""
    return NOW + timedelta(seconds=seconds)


def report(step: int, *, seconds: int = 0, **fields: Any) -> Progress:
    """Return a progress report of this step, updated `seconds` after NOW."""
    return Progress(step=step, update_time=seconds_after_start(seconds), **fields)


def status_with_progress(
    *pods: RawBody,
    before: Progress | None = None,
    polled: Progress | None = None,
    state: AttemptState = AttemptState.RUNNING,
) -> JobStatus:
    """Return the derived status of an attempt, with progress from the status before, from polls and from its pods."""
    record = AttemptRecord(attempt=0, state=state)
    status = JobStatus(attempt=0, attempts=(record,), start_time=NOW, progress=before)
    ftjob = job(status=status)
    return derive_status(ftjob, StatusContext(observation_of(ftjob, *pods, progress=polled), None, NOW))
