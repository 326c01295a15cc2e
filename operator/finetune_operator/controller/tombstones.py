"""The last look at pods that are gone. A drained pod's object lives for a second, and its evidence with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from finetune_operator import names
from finetune_operator.kube.api_client import Raw

LIFETIME = timedelta(minutes=15)
KEPT = 32  # of older attempts, per job


@dataclass(frozen=True)
class Tombstone:
    """A pod as it was last seen, and when it went (seconds of a monotonic clock)."""

    pod: Raw
    time: float

    @property
    def attempt(self) -> int | None:
        """Attempt that the pod belonged to."""
        label = self.pod["metadata"].get("labels", {}).get(names.ATTEMPT, "")
        return int(label) if label.isdecimal() else None


def keep_tombstones(
    tombstones: Iterable[Tombstone], *, present_attempt: int | None, now: float
) -> tuple[Tombstone, ...]:
    """What is worth keeping, oldest first.

    Of the present attempt every pod name's last tombstone, however old: it may be the only evidence of why the attempt
    fails. Of other attempts, and of jobs not known (`present_attempt` None), the last few of a limited time.
    """
    by_age = sorted(tombstones, key=lambda tombstone: tombstone.time)
    present = {
        t.pod["metadata"]["name"]: t for t in by_age if present_attempt is not None and t.attempt == present_attempt
    }
    others = [t for t in by_age if present_attempt is None or t.attempt != present_attempt]
    recent = [t for t in others[-KEPT:] if now - t.time < LIFETIME.total_seconds()]
    return tuple(sorted((*recent, *present.values()), key=lambda tombstone: tombstone.time))
