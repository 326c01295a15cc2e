"""Decides how long a status write may be postponed (decisions/110)."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import JobStatus, Phase
from finetune_operator.observation.pods import NodeObservation, PodPhase

# Shortest time between a status write and one that only changes displayed fields. While pods start or end, it is long
# enough that most attempts run, or have ended, before such a write.
RUNNING_WRITE_INTERVAL, WRITE_INTERVAL = timedelta(seconds=5), timedelta(seconds=10)
MAX_UNRECORDED_RUN = timedelta(seconds=2)  # in this time, a started trainer imports torch and writes no output


def compute_write_delay(
    current: JobStatus, new: JobStatus, nodes: Iterable[NodeObservation], now: datetime, *, since_write: timedelta
) -> timedelta | None:
    """Return how long to postpone the write of a changed status; None if it has to be written now.

    That all pods were created, and their uids, may be recorded later while none has written output: an operator that
    starts before the record at most creates a deleted pod again, and recognises pods by their start key.

    nodes: the observed nodes of the attempt of the new status.
    since_write: time since the last write.
    """
    interval = RUNNING_WRITE_INTERVAL if new.phase is Phase.RUNNING else WRITE_INTERVAL
    limits = [interval - since_write]
    if current.attempt == new.attempt and new.attempts and new.attempts[-1].created != current.attempts[-1].created:
        limits += [_compute_unrecorded_time(node, now) for node in nodes if node.phase is not PodPhase.PENDING]
        last = current.attempts[-1]
        record = new.attempts[-1].model_copy(update={"created": last.created, "pod_uids": last.pod_uids})
        new = new.model_copy(update={"attempts": (*new.attempts[:-1], record)})
    is_cosmetic = _without_cosmetic_fields(current) == _without_cosmetic_fields(new)
    return min(limits) if is_cosmetic and min(limits) > timedelta() else None


def _compute_unrecorded_time(node: NodeObservation, now: datetime) -> timedelta:
    """Return for how long a started node has still written no output; zero if that is not certain."""
    if node.phase is not PodPhase.RUNNING or node.is_terminating or node.started_at is None or node.started_at > now:
        return timedelta()
    return node.started_at + MAX_UNRECORDED_RUN - now


def _without_cosmetic_fields(status: JobStatus) -> JobStatus:
    """Return the status without the fields that are only displayed."""
    update: dict[str, object] = {
        "nodes": (),
        "replicas": 0,
        "display": None,
        "progress": None,
        "gpu_seconds": (),
    }
    if status.phase is Phase.STARTING:  # a job is Queued until the first pod is scheduled
        update["phase"] = Phase.QUEUED
    if status.attempts:
        last_record = status.attempts[-1]
        decisive_evidence = tuple(
            evidence for evidence in last_record.evidence if evidence.ended and evidence.outcome != Outcome.STOPPED
        )
        record = last_record.model_copy(
            update={
                "evidence": decisive_evidence,
                "evidence_summary": (),
                "gpus": None,
                "allocated_time": None,
                "last_step": None,
                "last_step_time": None,
                "first_step": None,
                "first_step_time": None,
            }
        )
        update["attempts"] = (*status.attempts[:-1], record)
    return status.model_copy(update=update)
