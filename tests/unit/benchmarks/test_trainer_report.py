"""Tests of the figures of `make bench-trainer` and `make bench-gpu`."""

import re

import torch

from benchmarks.trainer.comparison import ContenderResult
from benchmarks.trainer.contenders.attention_recorder import AttentionRecorder
from benchmarks.trainer.report import compute_speedups, format_median_and_range
from benchmarks.trainer.synthetic_data import summarise_forecast
from benchmarks.trainer.task import Measurement, MemoryForecast
from finetune_trainer.memory.breakdown import MemoryBreakdown, MemoryPart

OURS = ContenderResult([Measurement(seconds=seconds, cpu_seconds=2) for seconds in (2, 3, 4)])
PEER = ContenderResult([Measurement(seconds=seconds, cpu_seconds=3) for seconds in (4, 3, 6)])


def test_speedup_is_the_ratio_of_peer_time_to_our_time_in_each_round() -> None:
    assert compute_speedups(OURS, PEER) == [2.0, 1.0, 1.5]
    assert compute_speedups(OURS, PEER, use_cpu_time=True) == [1.5, 1.5, 1.5]
    assert format_median_and_range(compute_speedups(OURS, PEER)) == "1.50 (1.00 to 2.00)"


def test_forecast_of_counters_excludes_memory_that_they_do_not_contain() -> None:
    parts = {"weights": 70, "CUDA context": 20, "NCCL buffers": 5, "fragmentation": 3}
    breakdown = MemoryBreakdown(tuple(MemoryPart(name, size) for name, size in parts.items()))

    assert summarise_forecast(breakdown) == MemoryForecast(total=98, allocated=70, reserved=73)


def test_attention_recorder_counts_different_shapes_by_kernel() -> None:
    recorder = AttentionRecorder()
    recorder.install()
    try:
        for length in (4, 4, 6):
            query = torch.randn(1, 2, length, 8)
            attend = torch.nn.functional.scaled_dot_product_attention
            expected = attend(query, query, query, torch.ones(length, length, dtype=torch.bool).tril())
            causal = attend(query, query, query, is_causal=True)
    finally:
        recorder.uninstall()

    assert torch.allclose(causal, expected, atol=1e-6)
    assert sum(int(count) for count in re.findall(r"(\d+) shape", recorder.describe())) == 4
    assert "with mask: 2 shapes" in recorder.describe()
