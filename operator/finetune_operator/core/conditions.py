"""Derivation of the status: conditions, phase and printer columns, computed anew in each pass, never accumulated."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from finetune_api.batch import Batch
from finetune_api.termination import Outcome
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import (
    AttemptState,
    BatchStatus,
    Condition,
    JobStatus,
    NodeStatus,
    Phase,
    WaitStatus,
)
from finetune_operator.core.pending import REJECTED_REASONS, PendingReason
from finetune_operator.core.printer_columns import build_columns
from finetune_operator.core.progress import newest_progress, resolve_current_batch
from finetune_operator.observation.pods import NodeObservation, Observation, PodPhase


@dataclass(frozen=True)
class StatusContext:
    """What a status is derived from besides the job: observation, pending reason and time."""

    observation: Observation
    pending_reason: PendingReason | None
    now: datetime


def derive_status(job: FineTuneJob, context: StatusContext) -> JobStatus:
    """Return the status of the job with its derived fields: conditions, phase, waiting, progress, columns."""
    status = job.status
    nodes = context.observation.nodes_of_attempt(status.attempt) if status.attempt is not None else ()
    progress = newest_progress(status, nodes, context.observation.progress)
    status = status.model_copy(
        update={
            "observed_generation": job.metadata.generation,
            "waiting": _waiting(status, context) if status.completion_time is None else None,
            "progress": progress,
            "batch": _batch(resolve_current_batch(job, context.observation)),
            "output": _output(job),
            # without deleted pods: each replica has other tombstones, and they would overwrite each other's status
            "nodes": tuple(_node(node) for node in nodes if node.phase is not PodPhase.GONE),
        }
    )
    phase = _phase(job, status, nodes)
    desired = _conditions(job, status, context)
    return status.model_copy(
        update={
            "phase": phase,
            "conditions": keep_transition_times(desired, job.status.conditions),
            "display": build_columns(job, nodes, progress, phase),
        }
    )


def keep_transition_times(desired: Iterable[Condition], before: Iterable[Condition]) -> tuple[Condition, ...]:
    """Return the desired conditions, keeping the transition time of those whose status is unchanged."""
    since = {(c.type, c.status): c.last_transition_time for c in before}
    return tuple(
        c.model_copy(update={"last_transition_time": since.get((c.type, c.status), c.last_transition_time)})
        for c in desired
    )


def without_cosmetic_fields(status: JobStatus) -> JobStatus:
    """Return the status without the fields that may be written a second late without harm to the job."""
    update: dict[str, object] = {"nodes": (), "display": None, "progress": None}
    if status.attempts:
        last = status.attempts[-1]
        decisive = tuple(
            evidence for evidence in last.evidence if evidence.ended and evidence.outcome != Outcome.STOPPED
        )
        record = last.model_copy(
            update={"evidence": decisive, "last_step": None, "first_step": None, "first_step_time": None}
        )
        update["attempts"] = (*status.attempts[:-1], record)
    return status.model_copy(update=update)


def is_finished(status: JobStatus) -> bool:
    """Return whether the job is Complete or Failed, which it stays."""
    return status.completion_time is not None


def is_suspended(job: FineTuneJob, status: JobStatus) -> bool:
    """Return whether spec.suspend is set and every pod has been deleted."""
    return (
        job.spec.suspend
        and not is_finished(status)
        and (not status.attempts or status.attempts[-1].state is AttemptState.STOPPED)
    )


def _conditions(job: FineTuneJob, status: JobStatus, context: StatusContext) -> list[Condition]:
    """Return Running and Suspended in any state, others only while true, as kstatus and `kubectl wait` expect."""
    generation = job.metadata.generation

    def condition(type_: str, is_true: bool, reason: str, message: str = "") -> Condition:
        return Condition(
            type=type_,
            status="True" if is_true else "False",
            observed_generation=generation,
            last_transition_time=context.now,
            reason=reason,
            message=message,
        )

    reason, message = _describe_state(job, status, context.observation)
    running = bool(status.attempts) and status.attempts[-1].state is AttemptState.RUNNING and not is_finished(status)
    suspended = is_suspended(job, status)
    conditions = [
        condition("Running", running, reason, message),
        condition(
            "Suspended",
            suspended,
            Reason.SUSPENDED
            if suspended
            else (Reason.SUSPENDING if job.spec.suspend and not is_finished(status) else Reason.ACTIVE),
            message if suspended else "",
        ),
    ]
    if is_finished(status):
        end = "Complete" if _is_complete(status) else "Failed"
        conditions += [condition(end, True, reason, message), condition("Finished", True, reason, message)]
        if end == "Failed":
            conditions.append(condition("Stalled", True, reason, message))
    elif not running and not suspended:
        conditions.append(condition("Reconciling", True, reason, message))
    return conditions


def _is_complete(status: JobStatus) -> bool:
    return bool(status.attempts) and status.attempts[-1].state is AttemptState.SUCCEEDED


def _describe_state(job: FineTuneJob, status: JobStatus, observation: Observation) -> tuple[str, str]:
    """Return the reason and a one-line message for the state of the latest attempt."""
    if not status.attempts:
        if job.spec.suspend:
            return Reason.SUSPENDED, "not started; set spec.suspend to false to start"
        return Reason.QUEUED, ""
    record = status.attempts[-1]
    before = status.attempts[-2] if len(status.attempts) > 1 else None
    match record.state:
        case AttemptState.SUCCEEDED | AttemptState.FAILED:
            return record.reason, record.message
        case AttemptState.STOPPED:
            return Reason.SUSPENDED, f"every pod is released{_resume_point(job, status)}"
        case AttemptState.STOPPING:
            return Reason.STOPPING, f"attempt {record.attempt} is stopping: {record.reason}"
        case AttemptState.RUNNING:
            return (
                Reason.RUNNING,
                f"attempt {record.attempt} runs on {job.spec.num_nodes} nodes{_progress_unavailable(observation)}",
            )
        case AttemptState.STARTING:
            if status.waiting is not None:
                return status.waiting.reason, status.waiting.message
            if before is not None and before.state is AttemptState.FAILED:
                delayed = f" after {record.not_before:%H:%M:%S}" if record.not_before else ""
                return Reason.RESTARTING, f"attempt {record.attempt} starts{delayed}; {before.message}"
            return Reason.STARTING, f"attempt {record.attempt} is starting"


def _progress_unavailable(observation: Observation) -> str:
    """Return why progress is unknown; without it, the job looks like one that makes no progress."""
    if not observation.unreachable_endpoint:
        return ""
    return (
        f"; progress unavailable: {observation.unreachable_endpoint} does not answer"
        " (docs/operations/security.md, network)"
    )


def _resume_point(job: FineTuneJob, status: JobStatus) -> str:
    """Return the checkpoint from which a suspended job resumes; unknown for a command, which saves its own."""
    if job.spec.command is not None:
        return ""
    checkpoint = status.progress.last_checkpoint if status.progress else None
    return f"; it resumes from {checkpoint}" if checkpoint else "; no checkpoint was written yet"


def _phase(job: FineTuneJob, status: JobStatus, nodes: tuple[NodeObservation, ...]) -> Phase:
    if is_finished(status):
        return Phase.COMPLETE if _is_complete(status) else Phase.FAILED
    if is_suspended(job, status):
        return Phase.SUSPENDED
    if not status.attempts:
        return Phase.QUEUED
    record = status.attempts[-1]
    if record.state is AttemptState.RUNNING:
        return Phase.RUNNING
    if record.state is AttemptState.STOPPING:
        return Phase.SUSPENDED if job.spec.suspend else Phase.RESTARTING
    if status.restarts and len(status.attempts) > 1 and status.attempts[-2].state is AttemptState.FAILED:
        return Phase.RESTARTING
    return Phase.STARTING if any(node.scheduled for node in nodes) else Phase.QUEUED


def _waiting(status: JobStatus, context: StatusContext) -> WaitStatus | None:
    """Return the pending reason with its newest message, keeping `since` while the reason is the same."""
    pending_reason, before = context.pending_reason, status.waiting
    if not status.attempts or status.attempts[-1].state is not AttemptState.STARTING:
        return None
    if pending_reason is None:
        # rejected creates are kept in memory only: after a restart of the operator they are unknown until the next try
        untried = before is not None and before.reason in REJECTED_REASONS and not status.attempts[-1].created
        return before if untried else None
    # a `since` in the future comes from a wrong clock
    if before is not None and before.reason == pending_reason.reason and before.since <= context.now:
        return before.model_copy(update={"message": pending_reason.message})
    return WaitStatus(reason=pending_reason.reason, message=pending_reason.message, since=context.now)


def _batch(batch: Batch | None) -> BatchStatus | None:
    if batch is None:
        return None
    return BatchStatus(
        per_device_train_batch_size=batch.per_device,
        gradient_accumulation_steps=batch.accumulation,
        world_size=batch.world_size,
        effective=batch.effective,
    )


def _output(job: FineTuneJob) -> str | None:
    output = job.spec.output
    folder = f"{job.metadata.namespace}/{job.metadata.name}"
    if output is None:
        return None
    return f"{output.persistent_volume_claim.claim_name}:{output.sub_path or folder}"


def _node(node: NodeObservation) -> NodeStatus:
    phase = node.waiting.reason if node.waiting and node.phase is PodPhase.PENDING else node.phase.value
    if node.deleting and not node.ended:
        phase = "Terminating"
    return NodeStatus(node_rank=node.node_rank, pod_name=node.pod_name, k8s_node=node.k8s_node, phase=phase)
