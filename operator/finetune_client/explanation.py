"""Explains the state of a job: what happened, whose fault it was, the evidence, and what to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, Fault, Phase
from finetune_client.job import Job, find_reason
from finetune_operator.core.printer_columns import format_duration

UNPROCESSED_AFTER = timedelta(seconds=30)
MAX_EVIDENCE = 4
FAULT_SENTENCES = {
    Fault.USER: "the job: its spec, its data or its program has to change",
    Fault.RESOURCE: "the job: it needs more of a resource than it has",
    Fault.INFRASTRUCTURE: "the cluster: a Kubernetes node, a GPU or the control plane failed",
    Fault.PREEMPTION: "nobody: the pods were moved away for other work",
    Fault.TRANSIENT: "probably nobody: a fault that often disappears after a restart",
    Fault.UNKNOWN: "unknown: the evidence does not show whether the program or the cluster failed",
}


@dataclass(frozen=True)
class Explanation:
    """Explanation of a job's state; empty parts do not apply."""

    headline: str
    story: tuple[str, ...] = ()  # one line per attempt
    fault: str = ""
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def explain(job: Job, *, now: datetime) -> Explanation:
    """Explain the state of a job from its status."""
    story = tuple(_describe_attempt(record, now) for record in job.status.attempts)
    if job.failure is not None:
        return _explain_failure(job, job.failure.reason, job.failure.message, story)
    if job.phase is None:
        return _explain_unprocessed(job, now)
    failed = next((record for record in reversed(job.status.attempts) if record.state is AttemptState.FAILED), None)
    return Explanation(
        headline=_describe_state(job, now),
        story=story,
        fault=_describe_fault(failed) if failed else "",
        evidence=_list_evidence(failed) if failed else (),
        advice=tuple(_list_advice(job, failed)),
    )


def _explain_failure(job: Job, reason: str, message: str, story: tuple[str, ...]) -> Explanation:
    record = job.attempt
    known = find_reason(reason)
    advice = [known.advice] if known is not None and known.advice else []
    if record is not None:
        node = f" --node {record.node_rank}" if record.node_rank else ""
        advice.append(f"read the log: finetune logs {job.name}{node} --tail 50")
    if job.status.progress is not None and job.status.progress.last_checkpoint:
        advice.append(
            "to continue from the last checkpoint, delete the job and submit it again with the same name and output"
        )
    return Explanation(
        headline=f"{job.name} has failed: {reason}: {message}",
        story=story,
        fault=_describe_fault(record, known),
        evidence=_list_evidence(record) if record is not None else (),
        advice=tuple(advice),
    )


def _explain_unprocessed(job: Job, now: datetime) -> Explanation:
    created = job.metadata.creation_timestamp
    if created is None or now - created < UNPROCESSED_AFTER:
        return Explanation(f"{job.name} was created just now; the operator has not processed it yet")
    age = format_duration(int((now - created).total_seconds()))
    return Explanation(
        f"{job.name} was created {age} ago, and no operator has processed it",
        advice=(
            "check that the operator runs: kubectl get pods -A -l app.kubernetes.io/name=finetune-operator",
            f"check that it watches the namespace {job.namespace} (value watchNamespaces of the Helm chart)",
        ),
    )


def _describe_state(job: Job, now: datetime) -> str:
    restarts = f" after {_count(job.status.restarts, 'restart')}" if job.status.restarts else ""
    if job.status.waiting is not None:
        since = format_duration(max(0, int((now - job.status.waiting.since).total_seconds())))
        return f"{job.name} has been waiting for {since}: {job.status.waiting.reason}: {job.status.waiting.message}"
    if job.phase is Phase.COMPLETE:
        complete = job.find_condition("Complete")
        return f"{job.name} is complete{restarts}" + (f": {complete.message}" if complete else "")
    condition = job.find_condition("Suspended" if job.phase is Phase.SUSPENDED else "Reconciling")
    message = f": {condition.message}" if condition is not None and condition.message else ""
    return f"{job.name} is {str(job.phase).lower()}{restarts}{message}"


def _describe_attempt(record: AttemptRecord, now: datetime) -> str:
    duration = ""
    if record.start_time is not None:
        duration = format_duration(max(0, int(((record.end_time or now) - record.start_time).total_seconds())))
    steps = f"steps {record.first_step or 0} to {record.last_step}" if record.last_step is not None else ""
    cause = f"{record.reason}: {record.message}" if record.message else record.reason
    action = f"action: {record.action}" if record.action else ""
    facts = ", ".join(part for part in (str(record.state), duration, steps, action) if part)
    return f"attempt {record.attempt} ({facts})" + (f": {cause}" if cause else "")


def _describe_fault(record: AttemptRecord | None, reason: Reason | None = None) -> str:
    if reason is Reason.CANCELLED:
        return "nobody: the job was cancelled"
    fault = reason.fault if reason is not None and reason.fault is not None else record.fault if record else None
    return FAULT_SENTENCES[fault] if fault is not None else ""


def _list_evidence(record: AttemptRecord) -> tuple[str, ...]:
    """Return the evidence of nodes that failed by themselves; of others only if there is none."""
    failed = [each for each in record.evidence if each.outcome != "succeeded"]
    primary = [each for each in failed if not each.victim] or failed
    primary.sort(key=lambda each: (each.node_rank != record.node_rank, each.node_rank))
    lines = [_describe_evidence(each) for each in primary[:MAX_EVIDENCE]]
    return (*lines, *([f"{len(primary) - MAX_EVIDENCE} more nodes"] if len(primary) > MAX_EVIDENCE else []))


def _describe_evidence(evidence: Evidence) -> str:
    place = f"node {evidence.node_rank}" + (f" on {evidence.k8s_node}" if evidence.k8s_node else "")
    facts = (
        f"rank {evidence.rank}" if evidence.rank is not None else "",
        evidence.reason,
        evidence.disruption,
        f"exit code {evidence.exit_code}" if evidence.exit_code is not None else "",
        f"signal {evidence.signal}" if evidence.signal is not None else "",
        "its pod was deleted" if evidence.deleted else "",
        f"last step {evidence.last_step}" if evidence.last_step is not None else "",
    )
    error = ": ".join(part for part in (evidence.error_type, evidence.message) if part)
    return f"{place}: {', '.join(fact for fact in facts if fact)}" + (f"; {error}" if error else "")


def _list_advice(job: Job, failed: AttemptRecord | None) -> Iterator[str]:
    waiting = find_reason(job.status.waiting.reason) if job.status.waiting is not None else None
    if waiting is not None and waiting.meaning:
        yield waiting.meaning
    if waiting is Reason.UNSCHEDULABLE:
        yield f"compare the requests of the pods with the free capacity: finetune events {job.name}"
    if job.phase is Phase.SUSPENDED:
        yield f"finetune resume {job.name} continues it from its last checkpoint"
    for degradation in job.status.degraded:
        yield f"{degradation.reason}: {degradation.message}"
    reason = find_reason(failed.reason) if failed is not None else None
    if failed is not None and reason is not None and failed.action == FailureAction.RESTART and reason.advice:
        yield f"against {failed.reason}: {reason.advice}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
