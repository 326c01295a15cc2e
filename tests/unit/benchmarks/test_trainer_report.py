"""Tests of the reports of `make bench-trainer` and `make bench-gpu`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.trainer import gpu
from benchmarks.trainer.cases import CPU_CASES, GPU_CASES, LARGE_IMAGE, CaseSettings, shrink_case
from benchmarks.trainer.comparison import BenchmarkCase, ContenderResult
from benchmarks.trainer.contenders.attention_recorder import AttentionRecorder
from benchmarks.trainer.report import compute_speedups, describe_case, format_median_and_range
from benchmarks.trainer.synthetic_data import DatasetSettings, summarise_forecast
from benchmarks.trainer.task import EpochContent, Measurement, MemoryForecast, Task
from finetune_trainer.memory.breakdown import MemoryBreakdown, MemoryPart

REPOSITORY = Path(__file__).parents[3]
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


def test_report_contains_the_memory_of_tensors_on_a_cpu() -> None:
    counted = ContenderResult(OURS.measurements, tensor_bytes=300 * 2**20)

    _, ours, peer = describe_case(CASE, {"ours": counted, "TRL": PEER})

    assert "tensors 300 MiB" in ours
    assert "tensors" not in peer


def test_report_contains_error_of_contender_that_cannot_train_a_case() -> None:
    lines = list(
        describe_case(CASE, {"ours": OURS, "ms-swift": ContenderResult(error="ValueError: needs flash attention")})
    )

    assert lines[-1].split(maxsplit=1) == ["ms-swift", "ValueError: needs flash attention"]


def test_gpu_report_contains_mfu_memory_and_attention_kernels() -> None:
    gib = 2**30
    measurement = Measurement(seconds=2, peak_bytes=5 * gib, reserved_bytes=6 * gib, attention="flash: 2 shapes")
    forecast = MemoryForecast(total=9 * gib, allocated=7 * gib, reserved=8 * gib)
    case = BenchmarkCase("LoRA SFT", TASK, EpochContent(samples=30, tokens=6000, flops=3e12, forecast=forecast))

    _, line, kernels = describe_case(case, {"ours": ContenderResult([measurement])}, peak_flops=3e12)

    assert "mfu 50.0%" in line
    assert "peak 5.0 of 7.0 GiB forecast   reserved 6.0 of 8.0 GiB forecast" in line
    assert kernels.strip() == "attention kernels: flash: 2 shapes"


def test_forecast_of_counters_excludes_memory_that_they_do_not_contain() -> None:
    parts = {"weights": 70, "CUDA context": 20, "NCCL buffers": 5, "fragmentation": 3}
    breakdown = MemoryBreakdown(tuple(MemoryPart(name, size) for name, size in parts.items()))

    assert summarise_forecast(breakdown) == MemoryForecast(total=98, allocated=70, reserved=73)


def test_case_titles_are_unique() -> None:
    titles = [case_settings.title for case_settings in (*CPU_CASES, *GPU_CASES)]

    assert len(titles) == len(set(titles)) == 12


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


def test_contenders_inherit_packages_in_absolute_folders_after_those_of_the_repository(tmp_path: Path) -> None:
    """On a machine without package index, packages are installed into a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(("relative", str(tmp_path)))}
    program = [sys.executable, "-c", "from benchmarks.trainer.comparison import PYTHON_PATH; print(PYTHON_PATH)"]

    output = subprocess.run(program, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout

    folders = output.strip().split(os.pathsep)
    assert folders[-1] == str(tmp_path)
    assert "relative" not in folders


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


def test_large_images_have_768_tokens() -> None:
    settings = DatasetSettings(1, 2048, Path("rows"), image_size=LARGE_IMAGE)

    assert settings.image_tokens == 768


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_gpu_benchmark_is_skipped_without_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "no CUDA device: nothing was measured\n"
