"""Checks every way to shard or quantize a model with one rank: five steps, with the losses of DDP."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.checks.tasks import build_small_spec
from benchmarks.gpu_check.context import CheckContext, require, require_equal_losses
from benchmarks.trainer.contenders.ours import run_spec

STEPS, SAVED_STEP = 5, 3
FULL, LORA, NF4, EIGHT_BIT, COMPILED = "ddp", "lora", "nf4", "adamw_8bit", "torch_compile"
PRESETS: dict[str, dict[str, Any]] = {
    FULL: {},
    LORA: {},
    NF4: {"lora": {"quantization": "nf4"}},
    EIGHT_BIT: {"training": {"optim": "adamw_8bit"}},
    COMPILED: {"training": {"torchCompile": True}},
    "fsdp": {"fsdp": {}},
    "fsdp_offload": {"fsdp": {"cpuOffload": True}},
    **{
        preset: {"deepspeed": {"preset": preset}}
        for preset in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    },
}
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.01  # DDP computes with float32 weights, DeepSpeed with weights rounded to 16 bits
NF4_TOLERANCE = 0.05


def check_preset(context: CheckContext, name: str, mode: str = "") -> None:
    """Train five steps with a checkpoint after the third and the fifth; mode `resume`: train the last two again."""
    folder = context.scratch / f"preset-{name}-{mode}"
    fields = dict(PRESETS[name])
    training = {"saveSteps": SAVED_STEP, "learningRate": 1e-4, **fields.pop("training", {})}
    spec = build_small_spec(context, folder, steps=STEPS, has_lora=name in (LORA, NF4), training=training, **fields)
    reference = LORA if name == NF4 else FULL
    expected = [] if name in (FULL, LORA) else context.load_losses(f"preset-{reference}")
    run_spec(spec, folder / "run")
    output = folder / "run/output"
    losses = read_losses(output)
    context.record(losses=losses, **measure_memory())
    require(all(torch.isfinite(torch.tensor(losses))), f"losses {losses}")
    if expected:
        context.record(difference=require_equal_losses(losses, expected, tolerance=choose_tolerance(context, name)))
    else:
        require(losses[-1] < losses[0], f"the loss does not fall: {losses}")
        context.store_losses(f"preset-{name}", losses)
    if mode == "resume":
        check_resume(context, spec, folder, losses)
    with suppress(OSError):
        shutil.rmtree(folder)


def choose_tolerance(context: CheckContext, name: str) -> float:
    if name == NF4:
        return NF4_TOLERANCE
    if name == EIGHT_BIT:
        return BFLOAT16_TOLERANCE
    return BFLOAT16_TOLERANCE if context.on_gpu else FLOAT32_TOLERANCE


def check_resume(context: CheckContext, spec: dict[str, Any], folder: Path, losses: list[float]) -> None:
    """Remove the result and the last checkpoint, and train the last steps again."""
    output = folder / "run/output"
    shutil.rmtree(output / "result")
    shutil.rmtree(output / f"checkpoints/step-{STEPS:08d}")
    (saved,) = (output / "checkpoints").glob("step-*")
    run_spec(spec, folder / "run")
    resumed = read_losses(output)
    difference = require_equal_losses(resumed, losses, tolerance=BFLOAT16_TOLERANCE if context.on_gpu else 1e-6)
    context.record(resumed_from=saved.name, resumed_losses=resumed, resume_difference=difference)


def read_losses(output: Path) -> list[float]:
    history = json.loads((output / "result/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def measure_memory() -> dict[str, float]:
    """Return the peaks of torch's counters in GiB, or nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }
