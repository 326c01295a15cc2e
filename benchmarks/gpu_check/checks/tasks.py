"""Builds the tasks and specs of the checks that train a small model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.context import CheckContext
from benchmarks.trainer.cases import CaseSettings, shrink_case, write_task
from benchmarks.trainer.contenders.ours import build_spec
from benchmarks.trainer.model_shapes import QWEN2_5_0_5B, BenchmarkModelShape

_SETTINGS = CaseSettings("short", QWEN2_5_0_5B, rows=64, max_tokens=512, micro_batch_size=2, accumulation_steps=2)


def build_small_spec(
    context: CheckContext,
    folder: Path,
    *,
    steps: int,
    has_lora: bool,
    shape: BenchmarkModelShape = QWEN2_5_0_5B,
    **fields: dict[str, Any],
) -> dict[str, Any]:
    """Write rows and, unless another case of the run did so, a model of the shape; return the spec of a job.

    fields: fields of the spec in camelCase; `training`, `dataset` and `lora` are merged with the defaults.
    """
    settings = replace(_SETTINGS, shape=shape, lora=has_lora)
    settings = shrink_case(settings) if context.small else settings
    task = write_task(settings, folder, context.settings, models=context.models)
    spec = build_spec(task)
    del spec["training"]["numTrainEpochs"]
    spec["training"] |= {"maxSteps": steps, "maxGradNorm": 1.0}
    for name, value in fields.items():
        spec[name] = {**spec.get(name, {}), **value} if isinstance(spec.get(name), dict) else value
    return spec
