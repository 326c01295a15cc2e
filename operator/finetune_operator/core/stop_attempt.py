"""Ends an attempt: deletes its pods, judges the evidence of all nodes, then restarts or finishes the job."""

from dataclasses import replace
from datetime import datetime, timedelta
from enum import StrEnum

from finetune_api.oom_repair import MemoryShortage, build_memory_advice, find_next_repair
from finetune_api.termination import Outcome
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.repair import Repair
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, JobStatus, Progress
from finetune_operator.core.actions import EmitEvent
from finetune_operator.core.attempt_record import build_next_attempt, with_next_attempt, with_record
from finetune_operator.core.decision import Decision, build_decision, require_confirmation
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS, JobContext
from finetune_operator.core.progress import find_newest_progress, resolve_final_batch, summarise_steps
from finetune_operator.core.suspend_and_resume import record_suspension
from finetune_operator.failures.merge_evidence import collect_initial_evidence, merge_evidence
from finetune_operator.failures.restart_budget import RestartLimits, plan_restart
from finetune_operator.failures.rules import NODE_LOST_DISRUPTIONS, judge
from finetune_operator.failures.summarise_evidence import restore_evidence
from finetune_operator.failures.verdict import Verdict, with_verdict
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.plan.run_plan import RunPlan, plan_run

REQUEUE_INTERVAL = timedelta(seconds=5)
STARTUP = timedelta(seconds=5)  # no program has trained a step and saved it within this time
CANCELLED_MESSAGE = "spec.cancel was set"
ROOT_CAUSE_GRACE = timedelta(seconds=3)  # time for the root cause to end on its own after a victim has failed


class StopReason(StrEnum):
    """Reason why an attempt stops; the verdict on a failed or deleted node replaces this reason later."""

    SUSPENDED = Reason.SUSPENDED.value
    CANCELLED = Reason.CANCELLED.value
    DEADLINE = Reason.DEADLINE_EXCEEDED.value
    IMAGE = Reason.IMAGE_PULL_FAILED.value
    PENDING = Reason.PENDING_DEADLINE_EXCEEDED.value
    INCOMPLETE = Reason.GANG_INCOMPLETE.value
    NODE_FAILED = "NodeFailed"
    NODE_DELETED = "NodeDeleted"

    @classmethod
    def _missing_(cls, _value: object) -> "StopReason":
        """Read a reason of a newer release as NODE_FAILED: the evidence of the nodes then decides."""
        return cls.NODE_FAILED


REASONS_WITH_CHECKPOINT = (
    StopReason.SUSPENDED,
    StopReason.CANCELLED,
    StopReason.DEADLINE,
    StopReason.NODE_DELETED,
)


def begin_stopping(context: JobContext, reason: StopReason, *, message: str = "") -> Decision:
    """Record that the attempt is stopping, with the evidence so far; the next pass deletes the pods."""
    evidence = _collect_initial_evidence(context)
    update = {
        "state": AttemptState.STOPPING,
        "stop_time": context.now,
        "reason": reason.value,
        "message": message,
        "evidence": evidence,
    }
    record = context.record.model_copy(update={**update, **summarise_steps(context)})
    return build_decision(context, with_record(context.status, record))


def _collect_initial_evidence(context: JobContext) -> tuple[Evidence, ...]:
    """Return the evidence of all nodes; a created pod of which no event has arrived counts as not created."""
    created = context.record.created and not context.find_expected_pods()
    record = context.record.model_copy(update={"created": created})
    return collect_initial_evidence(record, context.nodes, context.job.num_attempt_nodes)


def continue_stopping(context: JobContext) -> Decision:
    """Delete the running pods of every attempt; judge the attempt once no pod can run."""
    # add the evidence that arrived since the last pass (decisions/102)
    recorded_evidence = restore_evidence(context.record, context.job.metadata.name)
    record = context.record.model_copy(
        update={"evidence": merge_evidence(recorded_evidence, context.nodes), **summarise_steps(context)}
    )
    # judge the attempt once no process can run
    running_pods = context.running_pods()
    if not running_pods:
        return require_confirmation(context, _judge_attempt(context, record))
    # if only victims have failed, give the root cause time to end on its own (decisions/105)
    if (remaining_grace := _compute_root_cause_grace(context, record)) > timedelta():
        return build_decision(context, with_record(context.status, record), requeue_after=remaining_grace)
    # delete the pods, with enough time for a checkpoint if the ranks can write one (decisions/113)
    has_failed_node = any(evidence.outcome == Outcome.FAILED for evidence in record.evidence)
    can_save = record.reason in REASONS_WITH_CHECKPOINT and not has_failed_node
    saving_nodes = [node for node in running_pods if can_save and _may_save(node, context.now)]
    other_nodes = [node for node in running_pods if node not in saving_nodes]
    actions = (
        *context.build_deletions(saving_nodes, context.job.spec.termination_grace_period_seconds),
        *context.build_deletions(other_nodes, ABORT_GRACE_SECONDS),
    )
    return build_decision(context, with_record(context.status, record), actions=actions, requeue_after=REQUEUE_INTERVAL)


def _may_save(node: NodeObservation, now: datetime) -> bool:
    """Return whether a pod may have a checkpoint to save, so that it needs its whole grace period.

    The kubelet of a lost Kubernetes node does nothing. A container that has just started has nothing to save, and may
    not receive SIGTERM: the kernel drops it until the process with id 1 has a handler.
    """
    if node.started_at is None or node.evidence.disruption in NODE_LOST_DISRUPTIONS:
        return False
    age = now - node.started_at
    return age >= STARTUP or age < timedelta()  # it is negative if the clock of the Kubernetes node is ahead


def _compute_root_cause_grace(context: JobContext, record: AttemptRecord) -> timedelta:
    """Return how long to delay the deletion of pods, so that a root cause observed after its victims is recorded.

    A node that receives SIGTERM reports that it was stopped, so its own error is lost.
    """
    verdict = judge(record.evidence)
    if record.reason != StopReason.NODE_FAILED or verdict is None or not verdict.victim:
        return timedelta()
    finished_at = verdict.evidence.finished_at if verdict.evidence else None
    remaining = finished_at + ROOT_CAUSE_GRACE - context.now if finished_at else timedelta()
    # if more time remains, the clock of a Kubernetes node is ahead
    return remaining if remaining <= 2 * ROOT_CAUSE_GRACE else timedelta()


def _judge_attempt(context: JobContext, record: AttemptRecord) -> Decision:
    """Judge the evidence of all nodes, then end the attempt or the job."""
    evidence = record.evidence or _collect_initial_evidence(context)
    verdict = judge(evidence)
    if verdict is None:
        return complete_job(context, record)  # if all nodes succeeded, the stop reason is ignored
    match StopReason(record.reason):
        case StopReason.SUSPENDED:
            return record_suspension(context, record)
        case StopReason.CANCELLED:
            return cancel_job(context, record)
        case StopReason.DEADLINE:
            limit = context.job.spec.active_deadline_seconds
            return fail_job(
                context, context.status, record, f"active for longer than activeDeadlineSeconds ({limit} s)"
            )
        case StopReason.IMAGE | StopReason.PENDING:
            return fail_job(context, context.status, record, record.message)
        case StopReason.INCOMPLETE:
            return end_attempt(context, Verdict(Reason.GANG_INCOMPLETE, record.message), record)
        case StopReason.NODE_FAILED | StopReason.NODE_DELETED:
            return end_attempt(context, verdict, record)


def end_attempt(context: JobContext, verdict: Verdict, record: AttemptRecord) -> Decision:
    """Record the verdict on the attempt, and begin the next attempt or fail the job, in one status write."""
    # choose a repair and decide whether the budget allows a restart
    verdict, repair = _choose_repair(context, verdict, record.evidence)
    has_group = context.status.scheduling is not None
    limits = RestartLimits(context.job.metadata.uid, context.job.spec.restart_policy, starts_as_group=has_group)
    restart = plan_restart(verdict, record, context.status.attempts[:-1], context.status.without_progress, limits)
    record = with_verdict(record, verdict)
    status = context.status.model_copy(update={"without_progress": restart.counts, "repair": repair})
    if not restart.is_allowed:
        return fail_job(context, status, record, restart.message)
    # close the record of this attempt
    ended_record = record.model_copy(
        update={"state": AttemptState.FAILED, "end_time": context.now, "action": verdict.action}
    )
    status = with_record(status, ended_record)
    # begin the next attempt
    next_record = build_next_attempt(context, status)
    not_before = context.now + restart.delay if restart.delay else None
    next_record = next_record.model_copy(update={"not_before": not_before})
    status = with_next_attempt(context, status, next_record).model_copy(update={"restarts": status.restarts + 1})
    delay = f" in {restart.delay.total_seconds():.0f} s" if restart.delay else ""
    avoidance = f", avoiding {', '.join(next_record.avoids)}" if next_record.avoids else ""
    message = f"{verdict.message}; attempt {next_record.attempt} starts{delay}{avoidance}"
    event = EmitEvent("Warning", verdict.reason, message, f"restart-{next_record.attempt}")
    return build_decision(context, status, actions=(event,))


def _choose_repair(
    context: JobContext, verdict: Verdict, evidence: tuple[Evidence, ...]
) -> tuple[Verdict, Repair | None]:
    """Choose the repair for the next attempt and describe it in the verdict; without a repair, the job fails."""
    current_repair, spec = context.status.repair, context.job.spec
    if verdict.action is not FailureAction.REPAIR:
        return verdict, current_repair
    batch = resolve_final_batch(context.job, evidence)
    shortage = MemoryShortage(
        verdict.reason, spec, current_repair, batch, runs_in_container=context.settings.on_cluster
    )
    chosen_repair = find_next_repair(shortage) if spec.restart_policy.max_restarts else None
    if chosen_repair is None:
        message = f"{verdict.message}; {build_memory_advice(shortage)}"
        return replace(verdict, no_repair_left=True, message=message), current_repair
    repair, description = chosen_repair
    return replace(verdict, message=f"{verdict.message}; retried with {description}"), repair


def complete_job(context: JobContext, record: AttemptRecord) -> Decision:
    """Complete the job after every node succeeded."""
    run_plan = plan_run(context.job, attempt=record.attempt, settings=context.settings)
    progress = find_newest_progress(context.status, context.nodes, context.observation.progress)
    message = _build_success_message(run_plan, progress)
    update = {
        "state": AttemptState.SUCCEEDED,
        "end_time": context.now,
        "reason": Reason.COMPLETED,
        "action": "Complete",
        "message": message,
        "evidence": (),
    }
    record = record.model_copy(update={**update, **summarise_steps(context)})
    status = with_record(context.status, record).model_copy(update={"completion_time": context.now})
    return build_decision(context, status, actions=(EmitEvent("Normal", Reason.COMPLETED, message, "end"),))


def _build_success_message(run_plan: RunPlan, progress: Progress | None) -> str:
    if run_plan.spec.command is None:
        early_end = f"; {progress.ended}" if progress and progress.ended else ""
        return f"the result is in {run_plan.output}/result{early_end}"
    output = f"; files written to FINETUNE_OUTPUT are in {run_plan.output}" if run_plan.output else ""
    return f"the command ended with exit 0 on every node{output}"


def cancel_job(context: JobContext, record: AttemptRecord) -> Decision:
    """Fail a job whose spec.cancel is or was set, after its last attempt was stopped or suspended."""
    record = record.model_copy(update={"reason": Reason.CANCELLED})
    return fail_job(context, context.status, record, CANCELLED_MESSAGE)


def fail_job(context: JobContext, status: JobStatus, record: AttemptRecord, message: str) -> Decision:
    """Fail a job whose current attempt ended without a result and is not restarted."""
    fault = Reason(record.reason).fault  # a deadline has no verdict, so the reason provides the fault
    update = {
        "state": AttemptState.FAILED,
        "end_time": record.end_time or context.now,
        "action": "Fail",
        "message": message,
        "fault": fault,
    }
    record = record.model_copy(update=update)
    status = with_record(status, record).model_copy(update={"completion_time": context.now})
    return build_decision(context, status, actions=(EmitEvent("Warning", record.reason, message, "end"),))
