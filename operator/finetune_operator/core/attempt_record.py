"""The records in status.attempts: replaced and appended, with their steps, downtime and kept evidence.

`created`, `state` and `runningTime` of a running attempt come from core.decide, `reason` and `message` from
core.stop_attempt, `evidence` from failures.merge_evidence.
"""

from datetime import datetime

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Progress
from finetune_operator.failures.node_avoidance import prune_attempts
from finetune_operator.failures.rules import most_relevant
from finetune_operator.observation.pods import NodeObservation

MAX_KEPT_EVIDENCE = 8  # nodes per ended attempt (decisions/106)


def with_record(status: JobStatus, record: AttemptRecord) -> JobStatus:
    """Return the status with the record of the current attempt replaced and the downtime before it recorded.

    An ended attempt keeps the evidence of a few nodes only: etcd limits an object to 1.5 MB, and twenty attempts of a
    thousand nodes would need ten times that.
    """
    if record.end_time is not None:
        record = record.model_copy(update={"evidence": most_relevant(record.evidence, limit=MAX_KEPT_EVIDENCE)})
    return status.model_copy(update={"attempts": (*record_downtime(status.attempts[:-1], record), record)})


def with_next_attempt(status: JobStatus, record: AttemptRecord, now: datetime) -> JobStatus:
    """Return the status with the record of a new attempt appended."""
    attempts = prune_attempts((*status.attempts, record), now)
    return status.model_copy(update={"attempt": record.attempt, "attempts": attempts})


def step_range(record: AttemptRecord, nodes: tuple[NodeObservation, ...], polled: Progress | None) -> dict[str, object]:
    """Return the update of a record with its first and last step and the time of the first, as far as reported."""
    terminations = [node.termination for node in nodes if node.termination]
    reports = [
        report for report in (*(termination.progress for termination in terminations), polled) if report is not None
    ]
    first_steps = [termination.first_step for termination in terminations] + [report.first_step for report in reports]
    first_step_times = [report.first_step_time for report in reports]
    last_steps = [record.last_step, *(report.step for report in reports)]
    first_step = record.first_step
    if first_step is None:
        first_step = min((step for step in first_steps if step is not None), default=None)
    earliest_time = min((time for time in first_step_times if time is not None), default=None)
    return {
        "first_step": first_step,
        "first_step_time": record.first_step_time or earliest_time,
        "last_step": max((step for step in last_steps if step is not None), default=None),
    }


def record_downtime(ended: tuple[AttemptRecord, ...], record: AttemptRecord) -> tuple[AttemptRecord, ...]:
    """Add downtime and lost steps to the last attempt that failed during training, once `record` trains again."""
    trained = [index for index, each in enumerate(ended) if each.first_step_time is not None]
    if record.first_step_time is None or not trained:
        return ended
    before = ended[trained[-1]]
    if before.state is not AttemptState.FAILED or before.downtime_seconds is not None:
        return ended
    failure_times = [
        each.finished_at for each in before.evidence if each.finished_at and each.outcome != Outcome.STOPPED
    ]
    failed_at = min(failure_times, default=before.end_time)
    downtime = record.first_step_time - failed_at if failed_at else None
    steps_lost = (before.last_step or 0) - record.first_step if record.first_step is not None else None
    update = {
        "downtime_seconds": max(0, round(downtime.total_seconds())) if downtime is not None else None,
        "steps_lost": None if steps_lost is None else max(0, steps_lost),
    }
    return (*ended[: trained[-1]], before.model_copy(update=update), *ended[trained[-1] + 1 :])
