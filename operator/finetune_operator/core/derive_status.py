"""Derives the status fields that users read: waiting, progress, batch, output, nodes and columns.

core.phase and core.conditions derive the phase and the conditions. Each pass computes all fields from scratch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.scheduling import SchedulingStatus
from finetune_api.v1alpha1.status import (
    MAX_LISTED_NODES,
    AttemptState,
    BatchStatus,
    Condition,
    JobStatus,
    NodeStatus,
    WaitStatus,
)
from finetune_operator import names
from finetune_operator.core.conditions import ConditionBuilder, build_conditions, keep_transition_times
from finetune_operator.core.degradations import derive_degradations
from finetune_operator.core.pending_reasons import REJECTED_REASONS, PendingReason
from finetune_operator.core.phase import derive_phase
from finetune_operator.core.printer_columns import build_columns
from finetune_operator.core.progress import find_newest_progress, resolve_current_batch
from finetune_operator.core.restrictions import restate_restrictions
from finetune_operator.observation.pods import NodeObservation, Observation, PodPhase


@dataclass(frozen=True)
class StatusContext:
    """Inputs of derive_status besides the job: observation, pending reason, time and a note about a newer image."""

    observation: Observation
    pending_reason: PendingReason | None
    now: datetime
    newer_image: str = ""  # explains how to use a newer trainer image; empty if there is none
    ignores_ttl: bool = False  # whether the job has a TTL, but the operator deletes no jobs


def derive_status(job: FineTuneJob, context: StatusContext) -> JobStatus:
    """Return the status of the job with its derived fields: conditions, phase, waiting, progress, columns."""
    status = job.status
    nodes = context.observation.nodes_of_attempt(status.attempt) if status.attempt is not None else ()
    existing_nodes = tuple(node for node in nodes if node.phase is not PodPhase.GONE)
    progress = find_newest_progress(status, nodes, context.observation.progress)
    status = status.model_copy(
        update={
            "observed_generation": job.metadata.generation,
            "waiting": _derive_wait_status(status, context) if status.completion_time is None else None,
            "scheduling": _derive_scheduling(status, context.observation),
            "progress": progress,
            "degraded": derive_degradations(status, context.observation.degraded),
            "batch": _derive_batch_status(resolve_current_batch(job, context.observation)),
            "output": _derive_output(job),
            # deleted pods are omitted, because replicas with different tombstones would overwrite each other's status
            "nodes": _derive_node_statuses(existing_nodes),
            "replicas": len(existing_nodes),
            "selector": _derive_selector(job, status.attempt),
        }
    )
    phase = derive_phase(job, status, nodes)
    desired_conditions = build_conditions(job, status, context.observation, context.now)
    if status.completion_time is None:
        desired_conditions += _build_notices(job, status, context)
    builder = ConditionBuilder(job.metadata.generation, context.now)
    missing_rights = context.observation.missing_rights
    conditions = restate_restrictions(desired_conditions, builder, missing_rights, ignores_ttl=context.ignores_ttl)
    return status.model_copy(
        update={
            "phase": phase,
            "conditions": keep_transition_times(conditions, job.status.conditions),
            "display": build_columns(job.model_copy(update={"status": status}), nodes, phase),
        }
    )


def _build_notices(job: FineTuneJob, status: JobStatus, context: StatusContext) -> Iterator[Condition]:
    """Yield conditions that inform people about an unfinished job, but change nothing."""
    builder = ConditionBuilder(job.metadata.generation, context.now)
    if context.newer_image:
        yield builder.build("TrainerImageOutdated", True, Reason.NEWER_TRAINER_IMAGE, context.newer_image)
    if status.degraded:
        message = "; ".join(f"{each.reason}: {each.message}" for each in status.degraded)
        yield builder.build("Degraded", True, status.degraded[0].reason, message)


def _derive_scheduling(status: JobStatus, observation: Observation) -> SchedulingStatus | None:
    """Return the recorded provider with the position in the queue, which is known only while the job waits."""
    workload = observation.workload
    if status.scheduling is None:
        return None
    position = None if workload is None or workload.position is None else workload.position + 1
    return status.scheduling.model_copy(update={"position": position})


def _derive_wait_status(status: JobStatus, context: StatusContext) -> WaitStatus | None:
    """Return the pending reason with its newest message; `since` is kept until the reason changes."""
    pending_reason, previous = context.pending_reason, status.waiting
    if not status.attempts or status.attempts[-1].state is not AttemptState.STARTING:
        return None
    if pending_reason is None:
        # a restarted operator has no record of rejected creates until it retries them
        was_rejected = previous is not None and previous.reason in REJECTED_REASONS
        return previous if was_rejected and not status.attempts[-1].created else None
    # a `since` in the future was written with a wrong clock
    if previous is not None and previous.reason == pending_reason.reason and previous.since <= context.now:
        return previous.model_copy(update={"message": pending_reason.message})
    return WaitStatus(reason=pending_reason.reason, message=pending_reason.message, since=context.now)


def _derive_batch_status(batch: Batch | None) -> BatchStatus | None:
    if batch is None:
        return None
    return BatchStatus(
        per_device_train_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.accumulation_steps,
        world_size=batch.world_size,
        effective=batch.effective,
    )


def _derive_output(job: FineTuneJob) -> str | None:
    output = job.spec.output
    folder = f"{job.metadata.namespace}/{job.metadata.name}"
    if output is None:
        return None
    return f"{output.persistent_volume_claim.claim_name}:{output.sub_path or folder}"


def _derive_selector(job: FineTuneJob, attempt: int | None) -> str:
    """Return the label selector of the current pods, which the scale subresource contains."""
    selector = f"{names.JOB_UID}={job.metadata.uid}"
    return selector if attempt is None else f"{selector},{names.ATTEMPT}={attempt}"


def _derive_node_statuses(existing_nodes: tuple[NodeObservation, ...]) -> tuple[NodeStatus, ...]:
    """Return the status of at most MAX_LISTED_NODES nodes by rank, preferring those that are not running."""
    by_relevance = sorted(existing_nodes, key=lambda node: node.phase is PodPhase.RUNNING and not node.is_terminating)
    listed_nodes = sorted(by_relevance[:MAX_LISTED_NODES], key=lambda node: node.node_rank)
    return tuple(_derive_node_status(node) for node in listed_nodes)


def _derive_node_status(node: NodeObservation) -> NodeStatus:
    phase = node.waiting.reason if node.waiting and node.phase is PodPhase.PENDING else node.phase.value
    if node.is_terminating and not node.has_ended:
        phase = "Terminating"
    return NodeStatus(node_rank=node.node_rank, pod_name=node.pod_name, k8s_node=node.k8s_node, phase=phase)
