"""Benchmark cases: small models for CPU, and realistic model shapes for GPU."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.trainer.comparison import BenchmarkCase
from benchmarks.trainer.model_shapes import (
    QWEN2_5_3B,
    QWEN2_5_7B,
    QWEN2_VL_7B,
    SMALL,
    SMALL_LLAVA,
    SMALL_QWEN2_VL,
    BenchmarkModelShape,
)
from benchmarks.trainer.synthetic_data import DatasetSettings, measure_content, write_model, write_rows
from benchmarks.trainer.task import Task


@dataclass(frozen=True)
class CaseSettings:
    """Settings of a benchmark case, which determine its model and rows."""

    title: str
    shape: BenchmarkModelShape
    rows: int
    max_tokens: int
    micro_batch_size: int
    accumulation_steps: int
    method: str = "sft"
    packing: bool = False
    lora: bool = True
    gradient_checkpointing: bool = False
    quantization: bool = False
    image_size: tuple[int, int] = (112, 84)  # width and height of the images of a vision-language model

    @property
    def model_name(self) -> str:
        """Name of the model's folder, which cases with the same shape share."""
        family, text = self.shape.family or "text", self.shape.text_config
        return f"{family}-{text['num_hidden_layers']}-{text['hidden_size']}-{text['vocab_size']}"


CPU_CASES = (
    CaseSettings("LoRA SFT", SMALL, rows=24, max_tokens=384, micro_batch_size=4, accumulation_steps=2),
    CaseSettings(
        "LoRA SFT, packed", SMALL, rows=24, max_tokens=384, micro_batch_size=2, accumulation_steps=1, packing=True
    ),
    CaseSettings("LoRA DPO", SMALL, rows=12, max_tokens=256, micro_batch_size=2, accumulation_steps=2, method="dpo"),
    CaseSettings("LoRA SFT of LLaVA", SMALL_LLAVA, rows=24, max_tokens=384, micro_batch_size=4, accumulation_steps=2),
    CaseSettings(
        "LoRA SFT of Qwen2-VL", SMALL_QWEN2_VL, rows=24, max_tokens=192, micro_batch_size=2, accumulation_steps=4
    ),
)
LARGE_IMAGE = (896, 672)  # 768 tokens in Qwen2-VL
GPU_CASES = (
    CaseSettings("LoRA SFT 7B, packed to 4096", QWEN2_5_7B, 256, 4096, 1, 4, packing=True, gradient_checkpointing=True),
    CaseSettings("full SFT 3B, 2048", QWEN2_5_3B, 128, 2048, 2, 4, lora=False, gradient_checkpointing=True),
    CaseSettings("LoRA DPO 7B, 2048", QWEN2_5_7B, 64, 2048, 1, 8, method="dpo", gradient_checkpointing=True),
    CaseSettings(
        "LoRA SFT Qwen2-VL-7B, 768 image tokens",
        QWEN2_VL_7B,
        64,
        2048,
        2,
        4,
        gradient_checkpointing=True,
        image_size=LARGE_IMAGE,
    ),
    CaseSettings("LoRA SFT 7B, 4096", QWEN2_5_7B, 128, 4096, 2, 4, gradient_checkpointing=True),
    CaseSettings(
        "QLoRA SFT 7B, packs of 4096",
        QWEN2_5_7B,
        128,
        4096,
        1,
        4,
        packing=True,
        gradient_checkpointing=True,
        quantization=True,
    ),
    CaseSettings(
        "LoRA SFT 7B, packed to 16384", QWEN2_5_7B, 128, 16_384, 1, 1, packing=True, gradient_checkpointing=True
    ),
)


OUT_OF_MEMORY_CASE = CaseSettings(
    "out of memory, LoRA SFT 3B, 4096", QWEN2_5_3B, rows=64, max_tokens=4096, micro_batch_size=32, accumulation_steps=1
)


def shrink_case(case: CaseSettings) -> CaseSettings:
    """Return the case with a small model and few rows, to test the benchmark itself on a CPU."""
    small_shape = SMALL if case.shape.family == "" else SMALL_QWEN2_VL
    text_config = {**small_shape.text_config, "num_hidden_layers": 2}
    return replace(
        case,
        shape=replace(small_shape, text_config=text_config),
        rows=8,
        max_tokens=192,
        micro_batch_size=2,
        accumulation_steps=2,
        image_size=(112, 84),
    )


@dataclass(frozen=True)
class DeviceSettings:
    """Dtype and device of a training run, and whether its memory is forecast."""

    dtype: str
    device: str
    forecasts_memory: bool = False


def prepare_case(
    case: CaseSettings, folder: Path, settings: DeviceSettings, *, models: Path | None = None
) -> BenchmarkCase:
    """Write the model and rows of a case, and measure the content of one epoch.

    models: folder of models that several cases share; models that it contains are not written again.
    """
    task = write_task(case, folder, settings, models=models)
    content = measure_content(task, folder / "counted", forecasts_memory=settings.forecasts_memory)
    return BenchmarkCase(case.title, task, content)


def write_task(case: CaseSettings, folder: Path, settings: DeviceSettings, *, models: Path | None = None) -> Task:
    """Write the model and rows of a case, and return its task."""
    model = (models or folder) / case.model_name
    if not model.exists():
        write_model(model, case.shape, dtype=settings.dtype, device=settings.device)
    image_size = case.image_size if case.shape.family else None
    rows = DatasetSettings(case.rows, case.max_tokens, folder / "rows", image_size=image_size)
    write_rows(rows, method=case.method)
    return Task(
        model=str(model),
        rows=str(rows.folder / "rows.jsonl"),
        columns=str(rows.folder / "columns.jsonl"),
        output=str(folder / "output"),
        method=case.method,
        family=case.shape.family,
        packing=case.packing,
        lora=case.lora,
        gradient_checkpointing=case.gradient_checkpointing,
        micro_batch_size=case.micro_batch_size,
        accumulation_steps=case.accumulation_steps,
        max_length=case.max_tokens,
        dtype=settings.dtype,
        on_gpu=settings.device == "cuda",
        quantization=case.quantization,
    )


def prepare_cases(cases: Iterable[CaseSettings], folder: Path, settings: DeviceSettings) -> Iterator[BenchmarkCase]:
    """Prepare and yield the cases one after the other, so that only one model is on disk at a time."""
    for number, case_settings in enumerate(cases):
        case = prepare_case(case_settings, folder / str(number), settings)
        yield case
        shutil.rmtree(case.task.model)
