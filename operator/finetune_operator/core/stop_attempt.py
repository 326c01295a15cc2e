"""The end of an attempt: stop what still runs, judge all the evidence at once, then one write says what follows."""

from dataclasses import replace
from datetime import timedelta
from enum import StrEnum

from finetune_api.oom_repair import Shortage, advise, next_repair
from finetune_api.termination import Outcome
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Progress, Repair
from finetune_operator.core.actions import Emit
from finetune_operator.core.conditions import newest_progress, trained_batch
from finetune_operator.core.job_context import Case, Decision, confirmed, with_next, with_record, write
from finetune_operator.failures.evidence import first_evidence, more_evidence
from finetune_operator.failures.node_avoidance import nodes_to_avoid
from finetune_operator.failures.restart_budget import plan_restart
from finetune_operator.failures.rules import LOST, judge
from finetune_operator.failures.verdict import Verdict
from finetune_operator.plan.manifests import GRACE_SECONDS
from finetune_operator.plan.run_plan import RunPlan, plan_run

ABORT_GRACE_SECONDS = 10  # of the siblings of a failed node: their ranks are blocked and have nothing to save
LOOK_AGAIN = timedelta(seconds=5)
LAST_WORDS_WITHIN = timedelta(seconds=3)  # of a node whose peers have noticed already that it failed


class StopReason(StrEnum):
    """Why an attempt is stopping; the verdict replaces it, unless it is the verdict already."""

    SUSPENDED = Reason.SUSPENDED.value
    DEADLINE = Reason.DEADLINE_EXCEEDED.value
    IMAGE = Reason.IMAGE_PULL_FAILED.value
    PENDING = Reason.PENDING_DEADLINE_EXCEEDED.value
    INCOMPLETE = Reason.GANG_INCOMPLETE.value
    NODE_FAILED = "NodeFailed"
    NODE_DELETED = "NodeDeleted"


SAVING = (StopReason.SUSPENDED, StopReason.DEADLINE, StopReason.NODE_DELETED)


def begin_to_stop(case: Case, reason: StopReason, *, message: str = "") -> Decision:
    """Write that the attempt is stopping, with what is known so far; the next pass stops the pods."""
    evidence = first_evidence(case.record, case.nodes, case.job.spec.num_nodes)
    update = {"state": AttemptState.STOPPING, "reason": reason.value, "message": message, "evidence": evidence}
    return write(case, with_record(case.status, case.record.model_copy(update={**update, **case.steps})))


def stop(case: Case) -> Decision:
    """Stop what still runs, of whatever attempt; when nothing can run any more, judge."""
    record = case.record.model_copy(update={"evidence": more_evidence(case.record.evidence, case.nodes), **case.steps})
    running = case.running_pods()
    if not running:
        return confirmed(case, _judge(case, record))
    if (pause := _culprit_may_speak(case, record)) > timedelta():
        return write(case, with_record(case.status, record), look_again=pause)
    failed = any(evidence.outcome == Outcome.FAILED for evidence in record.evidence)
    grace_seconds = GRACE_SECONDS if record.reason in SAVING and not failed else ABORT_GRACE_SECONDS
    lost = [node for node in running if node.evidence.disruption in LOST]  # nobody there obeys, or waits so long
    reachable = [node for node in running if node not in lost]
    actions = (*case.deletions(reachable, grace_seconds), *case.deletions(lost, ABORT_GRACE_SECONDS))
    return write(case, with_record(case.status, record), actions=actions, look_again=LOOK_AGAIN)


def _culprit_may_speak(case: Case, record: AttemptRecord) -> timedelta:
    """How long to wait before the others are stopped: who is seen first is often a victim.

    A node that is asked to stop ends as one that was stopped, and does not say any more what it died of.
    """
    verdict = judge(record.evidence)
    if record.reason != StopReason.NODE_FAILED or verdict is None or not verdict.victim:
        return timedelta()
    seen = verdict.evidence.finished_at if verdict.evidence else None
    left = seen + LAST_WORDS_WITHIN - case.now if seen else timedelta()
    return left if left <= 2 * LAST_WORDS_WITHIN else timedelta()  # no longer where a machine's clock is wrong


def _judge(case: Case, record: AttemptRecord) -> Decision:
    evidence = record.evidence or first_evidence(record, case.nodes, case.job.spec.num_nodes)
    verdict = judge(evidence)
    if verdict is None:
        return complete(case, record)  # success of every node wins over whatever began the stop
    match StopReason(record.reason):
        case StopReason.SUSPENDED:
            return _suspended(case, record)
        case StopReason.DEADLINE:
            limit = case.job.spec.active_deadline_seconds
            return fail(case, case.status, record, f"active for longer than activeDeadlineSeconds ({limit} s)")
        case StopReason.IMAGE | StopReason.PENDING:
            return fail(case, case.status, record, record.message)
        case StopReason.INCOMPLETE:
            released = Verdict(Reason.GANG_INCOMPLETE, record.message)
            return end_attempt(case, released, record)
        case StopReason.NODE_FAILED | StopReason.NODE_DELETED:
            return end_attempt(case, verdict, record)


def end_attempt(case: Case, verdict: Verdict, record: AttemptRecord) -> Decision:
    """The verdict on the old attempt and the number of the next one, in one write."""
    verdict, repair = _repaired(case, verdict)
    job, cause = case.job, verdict.evidence
    limits = (job.metadata.uid, job.spec.restart_policy)
    restart = plan_restart(verdict, record, case.status.attempts[:-1], case.status.without_progress, limits)
    update = {
        "reason": verdict.reason,
        "fault": verdict.fault,
        "message": verdict.message,
        "node_rank": cause.node_rank if cause else None,
        "rank": cause.rank if cause else None,
        "k8s_node": cause.k8s_node if cause else "",
    }
    record = record.model_copy(update=update)
    status = case.status.model_copy(update={"without_progress": restart.counts, "repair": repair})
    if not restart.again:
        return fail(case, status, record, restart.message)
    old = record.model_copy(update={"state": AttemptState.FAILED, "end_time": case.now, "action": verdict.action})
    status = with_record(status, old)
    new = next_attempt(case, status)
    new = new.model_copy(update={"not_before": case.now + restart.delay if restart.delay else None})
    status = with_next(status, new, case.now).model_copy(update={"restarts": status.restarts + 1})
    how = f" in {restart.delay.total_seconds():.0f} s" if restart.delay else ""
    how += f", away from {', '.join(new.avoids)}" if new.avoids else ""
    said = f"{verdict.message}; attempt {new.attempt} starts{how}"
    event = Emit("Warning", verdict.reason, said, f"restart-{new.attempt}")
    return write(case, status, actions=(event,))


def next_attempt(case: Case, status: JobStatus) -> AttemptRecord:
    """The one after those in the status, kept away from Kubernetes nodes that failed them."""
    avoiding = case.job.spec.restart_policy.avoid_failing_nodes and case.settings.on_cluster
    last = status.attempts[-1]
    waited_for = last.pending_since if last.running_time is None and last.state is AttemptState.FAILED else None
    return AttemptRecord(
        attempt=last.attempt + 1,
        state=AttemptState.STARTING,
        start_time=case.now,
        pending_since=case.now if waited_for is None else waited_for,
        avoids=nodes_to_avoid(status.attempts, case.now) if avoiding else (),
    )


def _repaired(case: Case, verdict: Verdict) -> tuple[Verdict, Repair | None]:
    """What is changed for the next attempt, told in the verdict; a verdict to fail where nothing can be changed."""
    before, spec = case.status.repair, case.job.spec
    if verdict.action is not FailureAction.REPAIR:
        return verdict, before
    run = plan_run(case.job, attempt=case.record.attempt, settings=case.settings)
    batch = trained_batch(case.job, case.seen) or run.batch
    shortage = Shortage(verdict.reason, spec, before, batch, in_container=case.settings.on_cluster)
    found = next_repair(shortage) if spec.restart_policy.max_restarts else None
    if found is None:
        message = f"{verdict.message}; {advise(shortage)}"
        return replace(verdict, helpless=True, message=message), before
    repair, said = found
    return replace(verdict, message=f"{verdict.message}; retried with {said}"), repair


def complete(case: Case, record: AttemptRecord) -> Decision:
    """Every node succeeded: the result is published, or every node's command ended well."""
    run = plan_run(case.job, attempt=record.attempt, settings=case.settings)
    progress = newest_progress(case.status, case.nodes, case.seen.progress)
    message = _success(run, progress)
    update = {
        "state": AttemptState.SUCCEEDED,
        "end_time": case.now,
        "reason": Reason.COMPLETED,
        "action": "Complete",
        "message": message,
        "evidence": (),
    }
    record = record.model_copy(update={**update, **case.steps})
    status = with_record(case.status, record).model_copy(update={"completion_time": case.now})
    return write(case, status, actions=(Emit("Normal", Reason.COMPLETED, message, "end"),))


def _success(run: RunPlan, progress: Progress | None) -> str:
    if run.spec.command is None:
        how = f"; {progress.ended}" if progress and progress.ended else ""
        return f"the result is in {run.output}/result{how}"
    written = f"; what it wrote to FINETUNE_OUTPUT is in {run.output}" if run.output else ""
    return f"the command ended with exit 0 on every node{written}"


def fail(case: Case, status: JobStatus, record: AttemptRecord, message: str) -> Decision:
    """The end without a result."""
    fault = Reason(record.reason).fault  # deadlines come without a verdict, and are somebody's fault all the same
    update = {"state": AttemptState.FAILED, "end_time": case.now, "action": "Fail", "message": message, "fault": fault}
    record = record.model_copy(update=update)
    status = with_record(status, record).model_copy(update={"completion_time": case.now})
    return write(case, status, actions=(Emit("Warning", record.reason, message, "end"),))


def _suspended(case: Case, record: AttemptRecord) -> Decision:
    record = record.model_copy(update={"state": AttemptState.STOPPED, "end_time": case.now, "action": "Suspend"})
    status = with_record(case.status, record).model_copy(update={"suspend_time": case.now})
    event = Emit("Normal", Reason.SUSPENDED, "every pod is released", f"suspended-{record.attempt}")
    return write(case, status, actions=(event,))
