"""Gathering evidence: what the nodes of an attempt left behind, kept in the status because pods vanish."""

from datetime import datetime

from finetune_api.status import AttemptRecord, Evidence
from finetune_api.termination import Outcome
from finetune_operator.failure import LOST
from finetune_operator.observe import Life, NodeObservation

LAST_WORDS = (Outcome.FAILED, Outcome.SUCCEEDED)


def first_evidence(record: AttemptRecord, nodes: tuple[NodeObservation, ...], num_nodes: int) -> tuple[Evidence, ...]:
    """At the moment an attempt starts to stop: until now it was to go on, so who deletes a pod is somebody else."""
    seen = {node.node_rank: node for node in nodes}
    ranks = range(max(num_nodes, *(rank + 1 for rank in seen)) if seen else num_nodes)  # it may have been changed
    return tuple(_first(seen.get(rank), rank, record) for rank in ranks)


def _first(node: NodeObservation | None, rank: int, record: AttemptRecord) -> Evidence:
    if node is None and not record.created:  # it never began, and so is not the cause
        return Evidence(node_rank=rank, ended=True, outcome=Outcome.STOPPED.value)
    if node is None:
        return Evidence(node_rank=rank, ended=True, deleted=True)
    taken_away = node.deleting or node.life is Life.GONE
    return node.evidence.model_copy(update={"deleted": taken_away and node.evidence.outcome not in LAST_WORDS})


def more_evidence(known: tuple[Evidence, ...], nodes: tuple[NodeObservation, ...]) -> tuple[Evidence, ...]:
    """While it stops: what is known is only added to, whatever the caches still show."""
    seen = {node.node_rank: node for node in nodes}
    return tuple(_merge(before, seen.get(before.node_rank)) for before in known)


def _merge(before: Evidence, node: NodeObservation | None) -> Evidence:
    if node is None or (before.ended and not before.deleted):
        return before
    now = node.evidence
    if (before.ended and not now.ended) or (before.exit_code is not None and now.exit_code is None):
        return before
    kept = {"deleted": before.deleted, "disruption": before.disruption or now.disruption}
    if not before.deleted and (node.deleting or node.life is Life.GONE):  # by us, for until now it was to go on
        if now.disruption not in LOST:  # a lost machine is no work of ours
            kept["disruption"] = before.disruption
        if _stopped_by_us(now, node.deletion_deadline):
            kept["outcome"] = Outcome.STOPPED.value  # so it is not the cause
    return now.model_copy(update=kept)


def _stopped_by_us(now: Evidence, deadline: datetime | None) -> bool:
    """Whether a node ended because its pod was deleted; a cause may be seen only after its victims, and after that."""
    if now.outcome in LAST_WORDS:
        return False
    if now.outcome == Outcome.STOPPED or now.exit_code is None or now.finished_at is None:
        return True
    # killed without last words: ours is the SIGKILL that follows when the grace period is over
    return deadline is not None and now.finished_at >= deadline


def steps(record: AttemptRecord, nodes: tuple[NodeObservation, ...], polled: int | None) -> dict[str, int | None]:
    """The first and last step of the attempt, as far as anybody has told."""
    firsts = [n.termination.first_step for n in nodes if n.termination and n.termination.first_step is not None]
    lasts = [n.evidence.last_step for n in nodes]
    told = [step for step in (*lasts, polled, record.last_step) if step is not None]
    first = record.first_step if record.first_step is not None else min(firsts, default=None)
    return {"first_step": first, "last_step": max(told, default=None)}
