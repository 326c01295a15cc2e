"""Derivation of the status fields that readers use: waiting, progress, batch, output, nodes, columns.

core.phase and core.conditions derive those two. Nothing is accumulated: each pass computes all of them anew.
"""

from dataclasses import dataclass
from datetime import datetime

from finetune_api.batch import Batch
from finetune_api.termination import Outcome
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import (
    AttemptState,
    BatchStatus,
    JobStatus,
    NodeStatus,
    WaitStatus,
)
from finetune_operator.core.conditions import build_conditions, keep_transition_times
from finetune_operator.core.pending_reasons import REJECTED_REASONS, PendingReason
from finetune_operator.core.phase import derive_phase
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
    phase = derive_phase(job, status, nodes)
    desired = build_conditions(job, status, context.observation, context.now)
    return status.model_copy(
        update={
            "phase": phase,
            "conditions": keep_transition_times(desired, job.status.conditions),
            "display": build_columns(job, nodes, progress, phase),
        }
    )


def without_cosmetic_fields(status: JobStatus) -> JobStatus:
    """Return the status without the fields that may be written a second late without harm to the job."""
    # decisions/110
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
