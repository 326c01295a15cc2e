"""Find the lowest and highest memory peak of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune_supervisor.messages import PeakMemory
from finetune_trainer.metrics.step_meter import MeasuredInterval


@dataclass(frozen=True)
class MemoryPeaks:
    """The lowest and highest memory peak of all ranks, in bytes."""

    lowest_bytes: int
    lowest_rank: int
    highest_bytes: int
    highest_rank: int
    reserved_bytes: int  # bytes reserved by torch's allocator on the rank with the highest peak; 0 on CPU
    step: int  # step of the highest peak
    longest_sequence: int  # tokens of the longest sequence in that step


def find_memory_peaks(intervals: Sequence[MeasuredInterval]) -> MemoryPeaks:
    """Return the lowest and highest peak; among ranks with equal peaks, the lowest rank."""
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


def describe_memory(peaks: MemoryPeaks, *, forecast_bytes: int | None) -> PeakMemory:
    """Return the memory peaks of all ranks and the forecast, as reported in the heartbeat."""
    return PeakMemory(
        forecast=forecast_bytes,
        peak_highest=peaks.highest_bytes,
        peak_highest_rank=peaks.highest_rank,
        peak_lowest=peaks.lowest_bytes,
        peak_lowest_rank=peaks.lowest_rank,
        reserved=peaks.reserved_bytes or None,
        cause=f"step {peaks.step}, longest sequence {peaks.longest_sequence} tokens",
    )
