"""Merges the evidence of a stopping attempt from several passes, because pods may disappear between passes.

The result is `attempts[].evidence`; observation.read_evidence reads the evidence of one node from its pod.
"""

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, Evidence
from finetune_operator.failures.container_start_rules import START_ERRORS
from finetune_operator.failures.rules import NODE_LOST_DISRUPTIONS
from finetune_operator.observation.pods import NodeObservation, PodPhase

CONCLUSIVE_OUTCOMES = (Outcome.FAILED, Outcome.SUCCEEDED)
RELABELLED, RESTARTED = "Relabelled", "Restarted"  # reasons that Kubernetes does not define
SIGKILL_EXIT_CODE = 137


def collect_initial_evidence(
    record: AttemptRecord, nodes: tuple[NodeObservation, ...], num_nodes: int
) -> tuple[Evidence, ...]:
    """Return the evidence of all nodes at the moment an attempt begins to stop.

    The operator does not delete pods of the attempt before that moment, so an earlier deletion may be the root cause.
    """
    nodes_by_rank = {node.node_rank: node for node in nodes}
    # spec.numNodes may have changed since the attempt began
    ranks = range(max(num_nodes, *(rank + 1 for rank in nodes_by_rank)) if nodes_by_rank else num_nodes)
    return tuple(_build_initial_evidence(nodes_by_rank.get(rank), rank, record) for rank in ranks)


def _build_initial_evidence(node: NodeObservation | None, rank: int, record: AttemptRecord) -> Evidence:
    if node is None and not record.created:  # a pod that was never created is not the root cause
        return Evidence(node_rank=rank, ended=True, outcome=Outcome.STOPPED.value)
    if node is None:
        return Evidence(node_rank=rank, ended=True, deleted=True)
    return _build_observed_evidence(node)


def _build_observed_evidence(node: NodeObservation) -> Evidence:
    is_lost = node.is_terminating or node.is_relabelled or node.was_restarted or node.phase is PodPhase.GONE
    return _mark_as_deleted(node) if is_lost and node.evidence.outcome not in CONCLUSIVE_OUTCOMES else node.evidence


def _mark_as_deleted(node: NodeObservation) -> Evidence:
    reason = RESTARTED if node.was_restarted else RELABELLED if node.is_relabelled else node.evidence.reason
    return node.evidence.model_copy(update={"deleted": True, "reason": reason})


def merge_evidence(recorded_evidence: tuple[Evidence, ...], nodes: tuple[NodeObservation, ...]) -> tuple[Evidence, ...]:
    """Merge new observations into the recorded evidence; a stale cache never removes evidence."""
    nodes_by_rank = {node.node_rank: node for node in nodes}
    return tuple(
        _merge_node_evidence(recorded, nodes_by_rank.get(recorded.node_rank)) for recorded in recorded_evidence
    )


def is_final(recorded: Evidence) -> bool:
    """Return whether later observations of the node cannot change its recorded evidence."""
    return bool(recorded.pod_name) and recorded.ended and (not recorded.deleted or recorded.reason == RESTARTED)


def _merge_node_evidence(recorded: Evidence, node: NodeObservation | None) -> Evidence:
    if node is None:
        return recorded
    # the pod is observed for the first time, so the operator cannot have deleted it (decisions/104)
    if not recorded.pod_name and not recorded.deleted:
        return _build_observed_evidence(node)
    # keep the evidence of the first termination of a node
    if is_final(recorded):
        return recorded
    observed = node.evidence
    # a stale cache must not overwrite an observed termination
    if (recorded.ended and not observed.ended) or (recorded.exit_code is not None and observed.exit_code is None):
        return recorded
    if node.was_restarted and observed.outcome not in CONCLUSIVE_OUTCOMES:
        return _mark_as_deleted(node)
    update = {
        "deleted": recorded.deleted,
        "disruption": recorded.disruption or observed.disruption,
        "preemptor": recorded.preemptor or observed.preemptor,
    }
    if recorded.reason == RELABELLED:
        update["reason"] = RELABELLED
    # a pod deleted after the attempt began to stop was deleted by the operator (decisions/103)
    if not recorded.deleted and (node.is_terminating or node.phase is PodPhase.GONE):
        if observed.disruption not in NODE_LOST_DISRUPTIONS:  # the operator never causes the loss of a Kubernetes node
            update |= {"disruption": recorded.disruption, "preemptor": recorded.preemptor}
        if _is_stopped_by_operator(observed, node):
            update["outcome"] = Outcome.STOPPED.value  # a stopped node is not the root cause
    return observed.model_copy(update=update)


def _is_stopped_by_operator(evidence: Evidence, node: NodeObservation) -> bool:
    """Return whether a node terminated because the operator deleted its pod.

    The root cause may be observed after its victims, and even after its own pod was deleted.
    """
    if evidence.outcome in CONCLUSIVE_OUTCOMES:
        return False
    if evidence.outcome == Outcome.STOPPED or evidence.exit_code is None or evidence.finished_at is None:
        return True
    # without a termination message, the node was killed by the kubelet if its grace period had expired
    if evidence.exit_code == SIGKILL_EXIT_CODE:
        return node.deletion_deadline is not None and evidence.finished_at >= node.deletion_deadline
    # other exit codes after the deletion are a reaction to SIGTERM, and a container whose pod is deleted cannot start
    was_deleted_before = node.deletion_requested_at is not None and evidence.finished_at >= node.deletion_requested_at
    return was_deleted_before or evidence.reason in START_ERRORS
