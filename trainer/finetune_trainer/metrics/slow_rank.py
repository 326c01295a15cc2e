"""Find a rank that slows down all other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

SLOW_RANK_EXCESS = 0.10  # a rank is slow if its own step time exceeds the median by more than this fraction


@dataclass(frozen=True)
class SlowRank:
    """A rank whose own step time exceeds the median of all ranks."""

    rank: int
    excess: float  # as a fraction of the median

    def __str__(self) -> str:
        return f"rank {self.rank} +{self.excess:.0%}"


def find_slow_rank(own_step_seconds: Sequence[float]) -> SlowRank | None:
    """Return the slowest rank if its time exceeds the median by more than SLOW_RANK_EXCESS (decisions/704)."""
    median, slowest = median_low(own_step_seconds), max(own_step_seconds)
    if median <= 0 or slowest <= median * (1 + SLOW_RANK_EXCESS):
        return None
    return SlowRank(own_step_seconds.index(slowest), slowest / median - 1)
