"""Computes the deadlines and pending timeouts of a job and its current attempt.

core.decide stops the attempt when a deadline or timeout has passed.
"""

from datetime import datetime, timedelta

from finetune_api.v1alpha1.status import AttemptState, WaitStatus
from finetune_operator.core.job_context import JobContext
from finetune_operator.observation.pods import PodPhase


def active_deadline(context: JobContext) -> datetime | None:
    """Return when activeDeadlineSeconds expires; suspended time does not count."""
    limit, start_time = context.job.spec.active_deadline_seconds, context.status.start_time
    if limit is None or start_time is None:
        return None
    return start_time + timedelta(seconds=limit + context.status.suspended_seconds)


def pending_deadline(context: JobContext) -> datetime | None:
    """Return when pendingDeadlineSeconds expires; every node of a starting attempt must run by then."""
    limit, since = context.job.spec.pending_deadline_seconds, context.record.pending_since
    is_starting = context.record.state is AttemptState.STARTING
    return since + timedelta(seconds=limit) if is_starting and limit is not None and since is not None else None


def release_time(context: JobContext) -> datetime | None:
    """Return when startupDeadlineSeconds expires, so that running nodes are released because others cannot start."""
    limit, pending_reason = context.job.spec.startup_deadline_seconds, context.pending_reason
    wait_status = context.status.waiting
    start_times = [node.started_at for node in context.nodes if node.phase is PodPhase.RUNNING and node.started_at]
    if (
        not limit
        or not start_times
        or pending_reason is None
        or wait_status is None
        or not pending_reason.has_no_timeout
    ):
        return None
    since = wait_status.since if wait_status.reason == pending_reason.reason else context.now
    return _correct_slow_clock(context, since, start_times) + timedelta(seconds=limit)


def pending_timeout_at(context: JobContext, wait_status: WaitStatus | None) -> datetime | None:
    """Return when the reported pending reason times out; None if it has no timeout or no longer applies."""
    pending_reason = context.pending_reason
    if pending_reason is None or pending_reason.timeout is None:
        return None
    if wait_status is None or wait_status.reason != pending_reason.reason:
        return None
    pending_nodes = (node for node in context.nodes if node.phase is PodPhase.PENDING)
    creating_times = [node.container_creating_since for node in pending_nodes if node.container_creating_since]
    return _correct_slow_clock(context, wait_status.since, creating_times) + pending_reason.timeout


def _correct_slow_clock(context: JobContext, since: datetime, pod_times: list[datetime]) -> datetime:
    """Return the later of `since` and the earliest pod time, because the clock that wrote `since` may be slow.

    Pod times in the future come from a fast clock and are ignored.
    """
    return max(since, min((time for time in pod_times if time <= context.now), default=since))
