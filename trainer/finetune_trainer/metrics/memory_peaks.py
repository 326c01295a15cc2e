"""Find the lowest and highest memory peak of all ranks."""

from collections.abc import Sequence

from finetune_supervisor.messages import PeakMemory
from finetune_trainer.metrics.step_meter import MeasuredInterval


def find_memory_peaks(intervals: Sequence[MeasuredInterval]) -> PeakMemory:
    """Return the lowest and highest peak; among ranks with equal peaks, the lowest rank."""
    peaks = [int(interval.peak_bytes) for interval in intervals]
    highest = peaks.index(max(peaks))
    step, longest_sequence = int(intervals[highest].peak_step), int(intervals[highest].peak_longest_sequence)
    return PeakMemory(
        peak_highest=max(peaks),
        peak_highest_rank=highest,
        peak_lowest=min(peaks),
        peak_lowest_rank=peaks.index(min(peaks)),
        reserved=int(intervals[highest].reserved_bytes) or None,
        cause=f"step {step}, longest sequence {longest_sequence} tokens",
    )
