"""Test the memory peaks of all ranks."""

from finetune_trainer.metrics.memory_peaks import find_memory_peaks
from finetune_trainer.metrics.step_meter import MeasuredInterval


def test_memory_peaks_contain_ranks_and_the_step_of_the_highest_peak() -> None:
    memory = find_memory_peaks(
        [
            MeasuredInterval(peak_bytes=5),
            MeasuredInterval(peak_bytes=9, peak_step=7, peak_longest_sequence=44, reserved_bytes=12),
            MeasuredInterval(peak_bytes=4),
        ]
    )

    assert (memory.peak_highest, memory.peak_highest_rank) == (9, 1)
    assert (memory.peak_lowest, memory.peak_lowest_rank) == (4, 2)
    assert (memory.forecast, memory.reserved, memory.cause) == (None, 12, "step 7, longest sequence 44 tokens")
