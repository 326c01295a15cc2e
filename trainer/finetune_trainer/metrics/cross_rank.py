"""Combines the measurements of all ranks: throughput, the slowest rank and the memory peaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from finetune_trainer.metrics.throughput import MeasuredInterval
from finetune_trainer.units import GIB

SLOW_RANK_EXCESS = 0.10  # a rank is reported as slow if its own time exceeds the median by more than this share
DATA_BOUND_SHARE = 0.20  # a run is data-bound if it spends more than this share of a step waiting for data


@dataclass(frozen=True)
class SlowRank:
    """The slowest rank, and by which share its own time exceeds that of the median rank."""

    rank: int
    excess: float

    def __str__(self) -> str:
        return f"rank {self.rank} +{self.excess:.0%}"


@dataclass(frozen=True)
class MemoryPeaks:
    """The lowest and the highest memory peak of all ranks, in bytes."""

    lowest_bytes: int
    lowest_rank: int
    highest_bytes: int
    highest_rank: int
    reserved_bytes: int  # reserved by torch's allocator on the rank with the highest peak; 0 on CPU
    step: int  # in which the highest peak was reached
    longest_sequence: int  # in that step, in tokens


@dataclass(frozen=True)
class CrossRankSummary:
    """One interval of all ranks. The first fields have the names that the log and status.progress use."""

    step_seconds: float
    tokens_per_second: float
    samples_per_second: float
    mfu: float | None
    data_wait_share: float  # of the rank that waited most, as a step takes as long as on its slowest rank
    own_step_seconds: tuple[float, ...]  # by rank, see MeasuredInterval.own_step_seconds
    peak_bytes: tuple[int, ...]  # by rank
    memory: MemoryPeaks

    def as_log(self) -> dict[str, float]:
        """Return the values for trainer_state.json and the trackers, by name."""
        values = {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "samples_per_second": self.samples_per_second,
            "mfu": self.mfu,
            "data_wait_share": self.data_wait_share,
            "peak_memory_gib": self.memory.highest_bytes / GIB,
        }
        return {name: _round(value) for name, value in values.items() if value is not None}


LOGGED_METRICS = (
    "step_seconds",
    "tokens_per_second",
    "samples_per_second",
    "mfu",
    "data_wait_share",
    "peak_memory_gib",
)


def summarise_ranks(intervals: Sequence[MeasuredInterval], *, peak_flops: float | None) -> CrossRankSummary:
    """Combine the intervals of all ranks, in rank order and of the same steps.

    peak_flops: of one GPU, per second; None leaves MFU out.
    """
    seconds = max(max(interval.seconds for interval in intervals), 1e-9)
    flops = sum(interval.flops for interval in intervals)
    return CrossRankSummary(
        step_seconds=seconds / max(intervals[0].steps, 1),
        tokens_per_second=sum(interval.tokens for interval in intervals) / seconds,
        samples_per_second=sum(interval.samples for interval in intervals) / seconds,
        mfu=flops / (seconds * peak_flops * len(intervals)) if peak_flops else None,
        data_wait_share=max(interval.data_wait_seconds / max(interval.seconds, 1e-9) for interval in intervals),
        own_step_seconds=tuple(interval.own_step_seconds for interval in intervals),
        peak_bytes=tuple(int(interval.peak_bytes) for interval in intervals),
        memory=find_memory_peaks(intervals),
    )


def find_slow_rank(own_step_seconds: Sequence[float]) -> SlowRank | None:
    """Return the slowest rank if it exceeds the median by more than SLOW_RANK_EXCESS (decisions/704)."""
    median, slowest = median_low(own_step_seconds), max(own_step_seconds)
    if median <= 0 or slowest <= median * (1 + SLOW_RANK_EXCESS):
        return None
    return SlowRank(own_step_seconds.index(slowest), slowest / median - 1)


def find_memory_peaks(intervals: Sequence[MeasuredInterval]) -> MemoryPeaks:
    """Return the lowest and highest peak; of equal peaks that of the lowest rank."""
    peaks = [int(interval.peak_bytes) for interval in intervals]
    highest = peaks.index(max(peaks))
    return MemoryPeaks(
        lowest_bytes=min(peaks),
        lowest_rank=peaks.index(min(peaks)),
        highest_bytes=max(peaks),
        highest_rank=highest,
        reserved_bytes=int(intervals[highest].reserved_bytes),
        step=int(intervals[highest].peak_step),
        longest_sequence=int(intervals[highest].peak_longest_sequence),
    )


def _round(value: float) -> float:
    """Round to six significant digits, more than the measurements are accurate to."""
    return float(f"{value:.6g}")
