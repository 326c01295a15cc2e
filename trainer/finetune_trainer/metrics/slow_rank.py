"""Find the rank that slows down all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

SLOW_RANK_EXCESS = 0.10  # a rank is reported as slow if its own time exceeds the median by more than this share


@dataclass(frozen=True)
class SlowRank:
    """The slowest rank, and by which share its own time exceeds that of the median rank."""

    rank: int
    excess: float

    def __str__(self) -> str:
        return f"rank {self.rank} +{self.excess:.0%}"


def find_slow_rank(own_step_seconds: Sequence[float]) -> SlowRank | None:
    """Return the slowest rank if it exceeds the median by more than SLOW_RANK_EXCESS (decisions/704)."""
    median, slowest = median_low(own_step_seconds), max(own_step_seconds)
    if median <= 0 or slowest <= median * (1 + SLOW_RANK_EXCESS):
        return None
    return SlowRank(own_step_seconds.index(slowest), slowest / median - 1)
