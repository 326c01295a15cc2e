"""Derives the transitions of a job from its status, for notifications.

The status is the only memory: an operator that took over derives the same transitions with the same keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator.core.phase import is_complete, is_finished


class TransitionType(StrEnum):
    """What happened to a job; the type of a notification ends with this word."""

    STARTED = "started"
    RUNNING = "running"
    RESTARTING = "restarting"
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class Transition:
    """One transition of a job. It contains only fields that do not change later."""

    type: TransitionType
    time: datetime
    attempt: int | None  # None for a job that failed before its first attempt
    reason: str = ""
    fault: str = ""
    message: str = ""  # explanation in one line
    node_rank: int | None = None  # of the root cause, as the next two
    rank: int | None = None
    k8s_node: str = ""

    @property
    def key(self) -> str:
        """Identifier of the transition within the job, such as `restarting-2`."""
        return f"{self.type}-{'none' if self.attempt is None else self.attempt}"


def list_transitions(status: JobStatus) -> tuple[Transition, ...]:
    """Return the transitions of all attempts in the status, and the end of the job, in their order."""
    previous = (None, *status.attempts[:-1])
    transitions = [
        transition
        for before, record in zip(previous, status.attempts, strict=False)
        for transition in _list_attempt_transitions(status, before, record)
    ]
    return (*transitions, *_list_job_end(status))


def _list_attempt_transitions(
    status: JobStatus, before: AttemptRecord | None, record: AttemptRecord
) -> Iterator[Transition]:
    if record.start_time is not None and record.attempt == 0:
        yield Transition(TransitionType.STARTED, record.start_time, record.attempt, message="attempt 0 starts")
    if record.start_time is not None and before is not None and before.state is AttemptState.STOPPED:
        message = f"attempt {record.attempt} starts"
        yield Transition(TransitionType.RESUMED, record.start_time, record.attempt, message=message)
    if record.running_time is not None:
        message = f"every node of attempt {record.attempt} runs"
        yield Transition(TransitionType.RUNNING, record.running_time, record.attempt, message=message)
    if record.end_time is None:
        return
    if record.state is AttemptState.STOPPED:
        yield _build_attempt_end(TransitionType.SUSPENDED, record.end_time, record)
    # the end of the last attempt of a failed job is the end of the job
    if record.state is AttemptState.FAILED and not (is_finished(status) and record is status.attempts[-1]):
        yield _build_attempt_end(TransitionType.RESTARTING, record.end_time, record)


def _list_job_end(status: JobStatus) -> Iterator[Transition]:
    if status.completion_time is None:
        return
    if status.attempts:
        end = TransitionType.COMPLETED if is_complete(status) else TransitionType.FAILED
        yield _build_attempt_end(end, status.completion_time, status.attempts[-1])
        return
    failed = next((condition for condition in status.conditions if condition.type == "Failed"), None)
    reason, message = (failed.reason, failed.message) if failed else ("", "")
    yield Transition(TransitionType.FAILED, status.completion_time, None, reason=reason, message=message)


def _build_attempt_end(transition_type: TransitionType, time: datetime, record: AttemptRecord) -> Transition:
    return Transition(
        transition_type,
        time,
        record.attempt,
        reason=record.reason,
        fault=record.fault or "",
        message=record.message or ("every pod is released" if record.state is AttemptState.STOPPED else ""),
        node_rank=record.node_rank,
        rank=record.rank,
        k8s_node=record.k8s_node,
    )
