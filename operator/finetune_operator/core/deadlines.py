"""When the deadlines of a job and of its current attempt end: active, pending and startup deadline, pending timeouts.

core.decide stops the attempt when one of them is over.
"""

from datetime import datetime, timedelta

from finetune_api.v1alpha1.status import AttemptState, WaitStatus
from finetune_operator.core.job_context import JobContext
from finetune_operator.observation.pods import PodPhase


def active_deadline(context: JobContext) -> datetime | None:
    """Return when activeDeadlineSeconds ends; time spent suspended does not count."""
    limit, started = context.job.spec.active_deadline_seconds, context.status.start_time
    if limit is None or started is None:
        return None
    return started + timedelta(seconds=limit + context.status.suspended_seconds)


def pending_deadline(context: JobContext) -> datetime | None:
    """Return when pendingDeadlineSeconds ends: by then every node of a starting attempt must run."""
    limit, since = context.job.spec.pending_deadline_seconds, context.record.pending_since
    starting = context.record.state is AttemptState.STARTING
    return since + timedelta(seconds=limit) if starting and limit is not None and since is not None else None


def release_time(context: JobContext) -> datetime | None:
    """Return when startupDeadlineSeconds ends: then running nodes are released, because others cannot start."""
    limit, pending_reason = context.job.spec.startup_deadline_seconds, context.pending_reason
    reported = context.status.waiting
    started = [node.started_at for node in context.nodes if node.phase is PodPhase.RUNNING and node.started_at]
    if not limit or not started or pending_reason is None or reported is None or not pending_reason.has_no_timeout:
        return None
    since = reported.since if reported.reason == pending_reason.reason else context.now
    return _correct_slow_clock(context, since, started) + timedelta(seconds=limit)


def pending_timeout_at(context: JobContext, reported: WaitStatus | None) -> datetime | None:
    """Return when the reported pending reason times out; None if it has no timeout or no longer applies."""
    pending_reason = context.pending_reason
    if pending_reason is None or pending_reason.timeout is None:
        return None
    if reported is None or reported.reason != pending_reason.reason:
        return None
    pending = (node for node in context.nodes if node.phase is PodPhase.PENDING)
    creating = [node.container_creating_since for node in pending if node.container_creating_since]
    return _correct_slow_clock(context, reported.since, creating) + pending_reason.timeout


def _correct_slow_clock(context: JobContext, since: datetime, pod_times: list[datetime]) -> datetime:
    """Return `since`, but no earlier than the first of the pods' times: the clock that wrote it may have been slow.

    Times in the future come from a clock ahead of this one and are ignored.
    """
    return max(since, min((time for time in pod_times if time <= context.now), default=since))
