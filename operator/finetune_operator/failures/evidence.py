"""Gathering evidence: what the nodes of an attempt left behind, kept in the status because pods vanish."""

from datetime import datetime

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, Progress
from finetune_operator.failures.rules import LOST
from finetune_operator.observation.pods import Life, NodeObservation

LAST_WORDS = (Outcome.FAILED, Outcome.SUCCEEDED)
RELABELLED, RESTARTED = "Relabelled", "Restarted"  # what was done to a pod, where Kubernetes has no word for it


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
    return _first_seen(node)


def _first_seen(node: NodeObservation) -> Evidence:
    taken_away = node.deleting or node.hidden or node.restarted or node.life is Life.GONE
    return _take_away(node) if taken_away and node.evidence.outcome not in LAST_WORDS else node.evidence


def _take_away(node: NodeObservation) -> Evidence:
    how = RESTARTED if node.restarted else RELABELLED if node.hidden else node.evidence.reason
    return node.evidence.model_copy(update={"deleted": True, "reason": how})


def more_evidence(known: tuple[Evidence, ...], nodes: tuple[NodeObservation, ...]) -> tuple[Evidence, ...]:
    """While it stops: what is known is only added to, whatever the caches still show."""
    seen = {node.node_rank: node for node in nodes}
    return tuple(_merge(before, seen.get(before.node_rank)) for before in known)


def _merge(before: Evidence, node: NodeObservation | None) -> Evidence:
    if node is None:
        return before
    if not before.pod_name and not before.deleted:  # thought never made; nor can we have deleted what we did not know
        return _first_seen(node)
    if before.ended and (not before.deleted or before.reason == RESTARTED):
        return before
    now = node.evidence
    if (before.ended and not now.ended) or (before.exit_code is not None and now.exit_code is None):
        return before
    if node.restarted and now.outcome not in LAST_WORDS:
        return _take_away(node)
    kept = {"deleted": before.deleted, "disruption": before.disruption or now.disruption}
    if before.reason == RELABELLED:
        kept["reason"] = RELABELLED
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


def steps(record: AttemptRecord, nodes: tuple[NodeObservation, ...], polled: Progress | None) -> dict[str, object]:
    """The first and last step of the attempt and when it trained, as far as anybody has told."""
    ended = [node.termination for node in nodes if node.termination]
    told = [*(said.progress for said in ended), polled]
    reports = [report for report in told if report is not None]
    firsts = [said.first_step for said in ended] + [report.first_step for report in reports]
    times = [report.first_step_time for report in reports]
    lasts = [record.last_step, *(report.step for report in reports)]
    first, time = record.first_step, record.first_step_time
    return {
        "first_step": first if first is not None else min((step for step in firsts if step is not None), default=None),
        "first_step_time": time or min((time for time in times if time is not None), default=None),
        "last_step": max((step for step in lasts if step is not None), default=None),
    }


def with_losses(ended: tuple[AttemptRecord, ...], record: AttemptRecord) -> tuple[AttemptRecord, ...]:
    """What the last attempt that failed in the middle of training cost, once this one trains again."""
    trained = [number for number, each in enumerate(ended) if each.first_step_time is not None]
    if record.first_step_time is None or not trained:
        return ended
    before = ended[trained[-1]]
    if before.state is not AttemptState.FAILED or before.downtime_seconds is not None:
        return ended
    ends = [each.finished_at for each in before.evidence if each.finished_at and each.outcome != Outcome.STOPPED]
    since = min(ends, default=before.end_time)
    lost = (before.last_step or 0) - record.first_step if record.first_step is not None else None
    update = {
        "downtime_seconds": max(0, round((record.first_step_time - since).total_seconds())) if since else None,
        "steps_lost": lost if lost is None else max(0, lost),
    }
    return (*ended[: trained[-1]], before.model_copy(update=update), *ended[trained[-1] + 1 :])
