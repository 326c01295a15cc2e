"""Tests of the reports of `make bench-trainer` and `make bench-gpu`."""

import pytest
import torch

from benchmarks.trainer import gpu
from benchmarks.trainer.cases import CPU_CASES, GPU_CASES, CaseSettings, shrink_case
from benchmarks.trainer.comparison import BenchmarkCase, ContenderResult
from benchmarks.trainer.report import compute_speedups, describe_case, format_median_and_range
from benchmarks.trainer.task import EpochContent, Measurement, Task

TASK = Task("model", "rows", "columns", "output", "sft", "", False, True, False, 4, 4, 512, "float32", False)
CASE = BenchmarkCase("LoRA SFT", TASK, EpochContent(samples=30, tokens=6000, flops=3e12))
OURS = ContenderResult(
    [
        Measurement(seconds=2, cpu_seconds=2),
        Measurement(seconds=3, cpu_seconds=2),
        Measurement(seconds=4, cpu_seconds=2),
    ]
)
PEER = ContenderResult(
    [
        Measurement(seconds=4, cpu_seconds=3),
        Measurement(seconds=3, cpu_seconds=3),
        Measurement(seconds=6, cpu_seconds=3),
    ]
)


def test_speedup_is_the_ratio_of_peer_time_to_our_time_in_each_round() -> None:
    assert compute_speedups(OURS, PEER) == [2.0, 1.0, 1.5]
    assert compute_speedups(OURS, PEER, use_cpu_time=True) == [1.5, 1.5, 1.5]
    assert format_median_and_range(compute_speedups(OURS, PEER)) == "1.50 (1.00 to 2.00)"


def test_report_describes_contender_by_median_round() -> None:
    title, ours, peer = describe_case(CASE, {"ours": OURS, "TRL": PEER})

    assert title == "LoRA SFT: 30 rows, 6000 tokens an epoch"
    assert "2000 tokens/s" in ours
    assert "10.00 samples/s" in ours
    assert "ours/TRL: 1.50 (1.00 to 2.00)" in peer


def test_report_contains_error_of_contender_that_cannot_train_a_case() -> None:
    lines = list(
        describe_case(CASE, {"ours": OURS, "ms-swift": ContenderResult(error="ValueError: needs flash attention")})
    )

    assert lines[-1].split(maxsplit=1) == ["ms-swift", "ValueError: needs flash attention"]


def test_gpu_report_contains_mfu_and_memory() -> None:
    ours = ContenderResult([Measurement(seconds=2, peak_bytes=5 * 2**30)])
    case = BenchmarkCase("LoRA SFT", TASK, EpochContent(samples=30, tokens=6000, flops=3e12, forecast_bytes=6 * 2**30))

    _, line = describe_case(case, {"ours": ours}, peak_flops=3e12)

    assert "mfu 50.0%" in line
    assert "peak 5.0 GiB   forecast 6.0 GiB" in line


def test_case_titles_are_unique() -> None:
    titles = [case_settings.title for case_settings in (*CPU_CASES, *GPU_CASES)]

    assert len(titles) == len(set(titles)) == 9


@pytest.mark.parametrize("case_settings", GPU_CASES, ids=[case_settings.title for case_settings in GPU_CASES])
def test_shrunk_case_keeps_method_and_model_family(case_settings: CaseSettings) -> None:
    small = shrink_case(case_settings)

    assert (small.method, small.packing, small.lora, small.gradient_checkpointing, bool(small.shape.family)) == (
        case_settings.method,
        case_settings.packing,
        case_settings.lora,
        case_settings.gradient_checkpointing,
        bool(case_settings.shape.family),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_gpu_benchmark_is_skipped_without_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "no CUDA device: nothing was measured\n"
