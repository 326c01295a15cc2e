"""Defines Decision, the result of a pass, and builds it with the derived status and the next requeue time."""

from dataclasses import dataclass, replace
from datetime import timedelta

from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.core import deadlines
from finetune_operator.core.actions import Action
from finetune_operator.core.derive_status import StatusContext, derive_status
from finetune_operator.core.gpu_seconds import record_allocation, update_gpu_seconds
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.snapshot import complete_snapshot, describe_newer_image


@dataclass(frozen=True)
class Decision:
    """Result of one pass: a status to write, actions to execute after the write, and a requeue delay.

    `needs_confirmation`: the decision depends on the absence of an object, which only a fresh LIST can confirm.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    requeue_after: timedelta | None = None
    needs_confirmation: bool = False


def build_decision(
    context: JobContext,
    status: JobStatus,
    *,
    actions: tuple[Action, ...] = (),
    requeue_after: timedelta | None = None,
) -> Decision:
    """Build a decision with all derived status fields, and with a requeue at the next deadline or earlier."""
    status = record_allocation(context, complete_snapshot(context, status))
    job = context.job.model_copy(update={"status": status})
    newer_image = describe_newer_image(job, context.settings)
    derived_status = derive_status(
        job,
        StatusContext(
            context.observation, context.pending_reason, context.now, newer_image, ignores_ttl=context.ignores_ttl
        ),
    )
    is_command = context.job.spec.command is not None
    derived_status = update_gpu_seconds(context.status, derived_status, context.now, is_command=is_command)
    return Decision(
        derived_status, actions, requeue_after=_find_earliest_requeue(context, derived_status, requeue_after)
    )


def require_confirmation(context: JobContext, decision: Decision) -> Decision:
    """Mark a decision that depends on the absence of an object, which the informer cache cannot prove."""
    return replace(decision, needs_confirmation=not context.observation.is_fresh)


def _find_earliest_requeue(context: JobContext, status: JobStatus, requeue_after: timedelta | None) -> timedelta | None:
    """Return the time until the next deadline or timeout that can change the decision."""
    delays = [requeue_after] if requeue_after is not None else []
    active_deadline = deadlines.active_deadline(context)
    if active_deadline is not None and status.completion_time is None and not context.job.spec.suspend:
        delays.append(active_deadline - context.now)
    if status.completion_time is None and context.status.attempts:
        start_deadlines = (deadlines.pending_deadline(context), deadlines.release_time(context))
        delays += [deadline - context.now for deadline in start_deadlines if deadline is not None]
    if (timeout_at := deadlines.pending_timeout_at(context, status.waiting)) is not None:
        delays.append(timeout_at - context.now)
    if status.completion_time is not None and context.ttl_seconds is not None:
        delays.append(timedelta(seconds=context.ttl_seconds))
    return min((delay for delay in delays if delay > timedelta()), default=None)
