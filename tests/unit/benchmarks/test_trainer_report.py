"""What `make bench-trainer` and `make bench-gpu` say of a contest."""

import pytest
import torch

from benchmarks.trainer import gpu
from benchmarks.trainer.cases import ON_CPU, ON_GPU, Run, shrink
from benchmarks.trainer.comparison import Case, Outcome
from benchmarks.trainer.report import describe_case, ratios, spread
from benchmarks.trainer.task import Answer, Content, Task

TASK = Task("model", "rows", "columns", "output", "sft", "", False, True, False, 4, 4, 512, "float32", False)
CASE = Case("LoRA SFT", TASK, Content(samples=30, tokens=6000, flops=3e12))
OURS = Outcome([Answer(seconds=2, cpu_seconds=2), Answer(seconds=3, cpu_seconds=2), Answer(seconds=4, cpu_seconds=2)])
PEER = Outcome([Answer(seconds=4, cpu_seconds=3), Answer(seconds=3, cpu_seconds=3), Answer(seconds=6, cpu_seconds=3)])


def test_a_ratio_is_that_of_one_round_and_above_one_where_ours_is_faster() -> None:
    assert ratios(OURS, PEER) == [2.0, 1.0, 1.5]
    assert ratios(OURS, PEER, cpu=True) == [1.5, 1.5, 1.5]
    assert spread(ratios(OURS, PEER)) == "1.50 (1.00 to 2.00)"


def test_a_contender_is_told_by_its_median_round() -> None:
    title, ours, peer = describe_case(CASE, {"ours": OURS, "TRL": PEER})

    assert title == "LoRA SFT: 30 rows, 6000 tokens an epoch"
    assert "2000 tokens/s" in ours
    assert "10.00 samples/s" in ours
    assert "ours/TRL: 1.50 (1.00 to 2.00)" in peer


def test_a_contender_that_cannot_do_a_case_says_why() -> None:
    lines = list(describe_case(CASE, {"ours": OURS, "ms-swift": Outcome(error="ValueError: needs flash attention")}))

    assert lines[-1].split(maxsplit=1) == ["ms-swift", "ValueError: needs flash attention"]


def test_on_a_gpu_the_share_of_its_operations_and_its_memory_are_told() -> None:
    ours = Outcome([Answer(seconds=2, peak_bytes=5 * 2**30)])
    case = Case("LoRA SFT", TASK, Content(samples=30, tokens=6000, flops=3e12, forecast_bytes=6 * 2**30))

    _, line = describe_case(case, {"ours": ours}, peak_flops=3e12)

    assert "mfu 50.0%" in line
    assert "peak 5.0 GiB   forecast 6.0 GiB" in line


def test_every_title_is_used_once() -> None:
    titles = [run.title for run in (*ON_CPU, *ON_GPU)]

    assert len(titles) == len(set(titles)) == 9


@pytest.mark.parametrize("run", ON_GPU, ids=[run.title for run in ON_GPU])
def test_a_case_made_small_stays_the_same_kind_of_training(run: Run) -> None:
    small = shrink(run)

    assert (small.method, small.packing, small.lora, small.checkpointing, bool(small.shape.family)) == (
        run.method,
        run.packing,
        run.lora,
        run.checkpointing,
        bool(run.shape.family),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "no CUDA device: nothing was measured\n"
