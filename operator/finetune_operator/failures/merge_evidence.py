"""Evidence of a stopping attempt, `attempts[].evidence`, merged over its passes because pods disappear.

observation.node_evidence reads the evidence of one node from its pod.
"""

from datetime import datetime

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, Evidence
from finetune_operator.failures.rules import NODE_LOST_DISRUPTIONS
from finetune_operator.observation.pods import NodeObservation, PodPhase

CONCLUSIVE_OUTCOMES = (Outcome.FAILED, Outcome.SUCCEEDED)
RELABELLED, RESTARTED = "Relabelled", "Restarted"  # reasons of our own: Kubernetes has none for these


def collect_initial_evidence(
    record: AttemptRecord, nodes: tuple[NodeObservation, ...], num_nodes: int
) -> tuple[Evidence, ...]:
    """Return the evidence at the moment an attempt begins to stop.

    Until then the operator deletes none of its pods: whatever deleted one is the cause.
    """
    by_rank = {node.node_rank: node for node in nodes}
    # spec.numNodes may have changed since the attempt began
    ranks = range(max(num_nodes, *(rank + 1 for rank in by_rank)) if by_rank else num_nodes)
    return tuple(_initial(by_rank.get(rank), rank, record) for rank in ranks)


def _initial(node: NodeObservation | None, rank: int, record: AttemptRecord) -> Evidence:
    if node is None and not record.created:  # never created, so not the cause
        return Evidence(node_rank=rank, ended=True, outcome=Outcome.STOPPED.value)
    if node is None:
        return Evidence(node_rank=rank, ended=True, deleted=True)
    return _build_first_evidence(node)


def _build_first_evidence(node: NodeObservation) -> Evidence:
    is_lost = node.deleting or node.relabelled or node.restarted or node.phase is PodPhase.GONE
    return _mark_as_deleted(node) if is_lost and node.evidence.outcome not in CONCLUSIVE_OUTCOMES else node.evidence


def _mark_as_deleted(node: NodeObservation) -> Evidence:
    reason = RESTARTED if node.restarted else RELABELLED if node.relabelled else node.evidence.reason
    return node.evidence.model_copy(update={"deleted": True, "reason": reason})


def merge_evidence(recorded: tuple[Evidence, ...], nodes: tuple[NodeObservation, ...]) -> tuple[Evidence, ...]:
    """Add the observations made while an attempt stops; a stale cache never removes recorded evidence."""
    by_rank = {node.node_rank: node for node in nodes}
    return tuple(_merge(before, by_rank.get(before.node_rank)) for before in recorded)


def _merge(before: Evidence, node: NodeObservation | None) -> Evidence:
    if node is None:
        return before
    # assumed never created; we cannot have deleted a pod we never observed (decisions/104)
    if not before.pod_name and not before.deleted:
        return _build_first_evidence(node)
    # the first end of a node is its evidence
    if before.ended and (not before.deleted or before.reason == RESTARTED):
        return before
    now = node.evidence
    # a cache that lags behind must not undo an observed end
    if (before.ended and not now.ended) or (before.exit_code is not None and now.exit_code is None):
        return before
    if node.restarted and now.outcome not in CONCLUSIVE_OUTCOMES:
        return _mark_as_deleted(node)
    update = {"deleted": before.deleted, "disruption": before.disruption or now.disruption}
    if before.reason == RELABELLED:
        update["reason"] = RELABELLED
    # deleted since the attempt began to stop, so by the operator (decisions/103)
    if not before.deleted and (node.deleting or node.phase is PodPhase.GONE):
        if now.disruption not in NODE_LOST_DISRUPTIONS:  # the loss of a Kubernetes node is never our deletion
            update["disruption"] = before.disruption
        if _is_stopped_by_operator(now, node.deletion_deadline):
            update["outcome"] = Outcome.STOPPED.value  # so not the cause
    return now.model_copy(update=update)


def _is_stopped_by_operator(now: Evidence, deadline: datetime | None) -> bool:
    """Return whether a node ended because the operator deleted its pod.

    The root cause may be observed only after its victims, and after its own pod was deleted.
    """
    if now.outcome in CONCLUSIVE_OUTCOMES:
        return False
    if now.outcome == Outcome.STOPPED or now.exit_code is None or now.finished_at is None:
        return True
    # killed without a termination message: by our SIGKILL if the grace period was over
    return deadline is not None and now.finished_at >= deadline
