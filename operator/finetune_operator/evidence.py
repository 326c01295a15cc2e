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
    return tuple(_first(seen.get(rank), rank, record) for rank in range(num_nodes))


def _first(node: NodeObservation | None, rank: int, record: AttemptRecord) -> Evidence:
    if node is None:
        return Evidence(node_rank=rank, ended=True, deleted=record.created)
    taken_away = node.deleting or node.life is Life.GONE
    return node.evidence.model_copy(update={"deleted": taken_away and node.evidence.outcome not in LAST_WORDS})


def more_evidence(known: tuple[Evidence, ...], nodes: tuple[NodeObservation, ...]) -> tuple[Evidence, ...]:
    """While it stops: what is known is only added to, whatever the caches still show."""
    seen = {node.node_rank: node for node in nodes}
    ends = (e.finished_at for e in known if e.exit_code is not None and e.outcome != Outcome.STOPPED)
    first_end = min((end for end in ends if end is not None), default=None)
    return tuple(_merge(before, seen.get(before.node_rank), first_end) for before in known)


def _merge(before: Evidence, node: NodeObservation | None, first_end: datetime | None) -> Evidence:
    if node is None or (before.ended and not before.deleted):
        return before
    now = node.evidence
    if before.exit_code is not None and now.exit_code is None:
        return before
    kept = {"deleted": before.deleted, "disruption": now.disruption or before.disruption}
    taken_away = node.deleting or node.life is Life.GONE
    # the cause may be seen later than its victims, and our deletion has reached its pod by then
    ended_before_we_stopped_it = now.finished_at and first_end and now.finished_at <= first_end
    if taken_away and not (before.deleted or now.outcome in LAST_WORDS or ended_before_we_stopped_it):
        # so it is not the cause, unless its machine was lost, which our deletion cannot bring about
        disruption = now.disruption if now.disruption in LOST else before.disruption
        kept |= {"outcome": Outcome.STOPPED.value, "disruption": disruption}
    return now.model_copy(update=kept)


def steps(record: AttemptRecord, nodes: tuple[NodeObservation, ...], polled: int | None) -> dict[str, int | None]:
    """The first and last step of the attempt, as far as anybody has told."""
    firsts = [n.termination.first_step for n in nodes if n.termination and n.termination.first_step is not None]
    lasts = [n.evidence.last_step for n in nodes]
    told = [step for step in (*lasts, polled, record.last_step) if step is not None]
    first = record.first_step if record.first_step is not None else min(firsts, default=None)
    return {"first_step": first, "last_step": max(told, default=None)}
