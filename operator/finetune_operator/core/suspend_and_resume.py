"""Suspends a job before its first attempt or after its pods were deleted, and resumes it.

core.decide begins to stop a running attempt when spec.suspend is set; core.stop_attempt ends it.
"""

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState
from finetune_operator.core.actions import EmitEvent
from finetune_operator.core.attempt_record import build_next_attempt, with_next_attempt, with_record
from finetune_operator.core.decision import Decision, build_decision
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS, JobContext


def suspend_before_start(context: JobContext) -> Decision:
    """Record the suspension time of a job that has not started yet."""
    suspend_time = context.status.suspend_time or context.now
    return build_decision(context, context.status.model_copy(update={"suspend_time": suspend_time}))


def record_suspension(context: JobContext, record: AttemptRecord) -> Decision:
    """Record that every pod of a suspended job has been deleted."""
    record = record.model_copy(update={"state": AttemptState.STOPPED, "end_time": context.now, "action": "Suspend"})
    status = with_record(context.status, record).model_copy(update={"suspend_time": context.now})
    event = EmitEvent("Normal", Reason.SUSPENDED, "every pod is released", f"suspended-{record.attempt}")
    return build_decision(context, status, actions=(event,))


def keep_job_suspended(context: JobContext) -> Decision:
    """Delete pods of a suspended job that were observed late or that a sidecar keeps running."""
    kept_by_sidecars, requeue_after = context.find_pods_kept_by_sidecars()
    actions = context.build_deletions([*context.running_pods(), *kept_by_sidecars], ABORT_GRACE_SECONDS)
    actions += context.release_quota()
    return build_decision(context, context.status, actions=actions, requeue_after=requeue_after)


def resume_job(context: JobContext) -> Decision:
    """Begin the next attempt and add the suspended time to suspendedSeconds."""
    record = build_next_attempt(context, context.status)
    suspend_time = context.status.suspend_time
    suspended_seconds = max(0, (context.now - suspend_time).total_seconds()) if suspend_time else 0
    status = with_next_attempt(context, context.status, record).model_copy(
        update={"suspended_seconds": context.status.suspended_seconds + round(suspended_seconds), "suspend_time": None}
    )
    event = EmitEvent("Normal", Reason.RESUMED, f"attempt {record.attempt} starts", f"resumed-{record.attempt}")
    return build_decision(context, status, actions=(event,))
