"""Checks two ranks that share one GPU over gloo, because NCCL refuses two ranks on one GPU."""

import math
import os
from typing import Any

from benchmarks.gpu_check.checks.tasks import build_small_spec
from benchmarks.gpu_check.context import CheckContext, require, require_equal_losses
from benchmarks.trainer.model_shapes import SHAPE_0_1B
from testing.processes.launches import run_cells

STEPS = 5
DDP = "ddp"
PRESETS: dict[str, dict[str, Any]] = {DDP: {}, "zero2": {"deepspeed": {"preset": "zero2"}}, "fsdp": {"fsdp": {}}}
BACKEND_SWITCH = "FINETUNE_TEST_CUDA_BACKEND"  # read by finetune_trainer.distributed.process_group
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 1e-4, 0.01


def check_two_ranks(context: CheckContext, name: str) -> None:
    """Train five steps with two ranks; DDP must have the losses of one rank, and the other presets those of DDP."""
    if context.on_gpu:
        os.environ[BACKEND_SWITCH] = "gloo"
    tolerance = BFLOAT16_TOLERANCE if context.on_gpu else FLOAT32_TOLERANCE
    expected = train(context, DDP, ranks=1) if name == DDP else context.load_losses("two-ranks")
    losses = train(context, name, ranks=2)
    context.record(losses=losses, expected=expected)
    require(all(map(math.isfinite, losses)), f"losses {losses}")
    context.record(difference=require_equal_losses(losses, expected, tolerance=tolerance))
    if name == DDP:
        require(losses[-1] < losses[0], f"the loss does not fall: {losses}")
        context.store_losses("two-ranks", losses)


def train(context: CheckContext, name: str, *, ranks: int) -> list[float]:
    """Return the losses of five steps with the same effective batch for every number of ranks."""
    folder = context.scratch / f"two-ranks-{name}-{ranks}"
    training = {"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 4 // ranks, "saveSteps": 1_000_000}
    spec = build_small_spec(
        context, folder, steps=STEPS, has_lora=False, shape=SHAPE_0_1B, training=training, **PRESETS[name]
    )
    spec["nprocPerNode"] = ranks
    losses: list[float] = run_cells(folder / "cells", {name: spec}, ranks=ranks)[name]["loss"]
    return losses
