"""What is held against what: the small cases of a CPU, and real shapes for a GPU."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.trainer.comparison import Case
from benchmarks.trainer.model_shapes import (
    QWEN2_5_3B,
    QWEN2_5_7B,
    QWEN2_VL_7B,
    SMALL,
    SMALL_LLAVA,
    SMALL_QWEN2_VL,
    Shape,
)
from benchmarks.trainer.synthetic_data import Rows, measure_content, write_model, write_rows
from benchmarks.trainer.task import Task


@dataclass(frozen=True)
class Run:
    """A case before there are models and rows."""

    title: str
    shape: Shape
    rows: int
    longest: int  # tokens
    per_device: int
    accumulation: int
    method: str = "sft"
    packing: bool = False
    lora: bool = True
    checkpointing: bool = False


ON_CPU = (
    Run("LoRA SFT", SMALL, rows=24, longest=384, per_device=4, accumulation=2),
    Run("LoRA SFT, packed", SMALL, rows=24, longest=384, per_device=2, accumulation=1, packing=True),
    Run("LoRA DPO", SMALL, rows=12, longest=256, per_device=2, accumulation=2, method="dpo"),
    Run("LoRA SFT of LLaVA", SMALL_LLAVA, rows=24, longest=192, per_device=2, accumulation=4),
    Run("LoRA SFT of Qwen2-VL", SMALL_QWEN2_VL, rows=24, longest=192, per_device=2, accumulation=4),
)
ON_GPU = (
    Run("LoRA SFT 7B, packed to 4096", QWEN2_5_7B, 256, 4096, 1, 4, packing=True, checkpointing=True),
    Run("full SFT 3B, 2048", QWEN2_5_3B, 128, 2048, 2, 4, lora=False, checkpointing=True),
    Run("LoRA DPO 7B, 2048", QWEN2_5_7B, 64, 2048, 1, 8, method="dpo", checkpointing=True),
    Run("LoRA SFT Qwen2-VL-7B, 2048", QWEN2_VL_7B, 64, 2048, 2, 4, checkpointing=True),
)


RUNS_OUT = Run("out of memory, LoRA SFT 3B, 4096", QWEN2_5_3B, rows=64, longest=4096, per_device=32, accumulation=1)


def shrink(run: Run) -> Run:
    """The same with a small model and few rows, so that a CPU can show that everything is connected."""
    small = SMALL if run.shape.family == "" else SMALL_QWEN2_VL
    text = {**small.text, "num_hidden_layers": 2}
    return replace(run, shape=replace(small, text=text), rows=8, longest=192, per_device=2, accumulation=2)


@dataclass(frozen=True)
class Machine:
    """In what and on what is trained, and whether memory is forecast for it."""

    dtype: str
    device: str
    forecasts: bool = False


def prepare(run: Run, folder: Path, machine: Machine) -> Case:
    """Model and rows are written, and what is in them is counted."""
    model = folder / "model"
    write_model(model, run.shape, dtype=machine.dtype, device=machine.device)
    rows = Rows(run.rows, run.longest, folder / "rows")
    write_rows(rows, method=run.method, sees=bool(run.shape.family))
    task = Task(
        model=str(model),
        rows=str(rows.folder / "rows.jsonl"),
        columns=str(rows.folder / "columns.jsonl"),
        output=str(folder / "output"),
        method=run.method,
        family=run.shape.family,
        packing=run.packing,
        lora=run.lora,
        checkpointing=run.checkpointing,
        per_device=run.per_device,
        accumulation=run.accumulation,
        max_length=run.longest,
        dtype=machine.dtype,
        on_gpu=machine.device == "cuda",
    )
    return Case(run.title, task, measure_content(task, folder / "counted", forecasts=machine.forecasts))


def prepare_all(runs: Iterable[Run], folder: Path, machine: Machine) -> Iterator[Case]:
    """One after the other, when it is wanted; the disk holds one model."""
    for number, run in enumerate(runs):
        case = prepare(run, folder / str(number), machine)
        yield case
        shutil.rmtree(case.task.model)
