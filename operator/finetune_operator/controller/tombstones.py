"""Tombstones, the last known objects of deleted pods, which preserve the evidence of pods that disappear."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from finetune_operator.observation.ownership import RawBody

TOMBSTONE_TTL = timedelta(minutes=15)
MAX_OLD_TOMBSTONES = 32  # limit per job, of all pods but those of the current attempt


@dataclass(frozen=True)
class Tombstone:
    """Last known object of a deleted pod; `deleted_at` is in seconds of a monotonic clock.

    attempt: the attempt for which the operator created the pod; None if it was not the current one, or not created by
    the operator.
    """

    pod: RawBody
    deleted_at: float
    attempt: int | None


def prune_tombstones(
    tombstones: Iterable[Tombstone], *, current_attempt: int | None, now: float
) -> tuple[Tombstone, ...]:
    """Return the tombstones to retain, oldest first.

    For the current attempt, the last tombstone of each pod name is kept regardless of its age, because it may be the
    only evidence of the failure. For other attempts, and for unknown jobs (`current_attempt` is None), the most recent
    tombstones are kept for TOMBSTONE_TTL.
    """
    by_age = sorted(tombstones, key=lambda tombstone: tombstone.deleted_at)
    current_tombstones = {
        tombstone.pod["metadata"]["name"]: tombstone
        for tombstone in by_age
        if current_attempt is not None and tombstone.attempt == current_attempt
    }
    other_tombstones = [t for t in by_age if current_attempt is None or t.attempt != current_attempt]
    recent_tombstones = [
        t for t in other_tombstones[-MAX_OLD_TOMBSTONES:] if now - t.deleted_at < TOMBSTONE_TTL.total_seconds()
    ]
    return tuple(sorted((*recent_tombstones, *current_tombstones.values()), key=lambda tombstone: tombstone.deleted_at))
