"""Measures one layer of a 7B model at changing lengths, with and without cuDNN and masks, and compares the outputs."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModel, Qwen2Config

from benchmarks.gpu_check.context import CheckContext, require
from benchmarks.trainer.contenders.attention_recorder import AttentionRecorder
from benchmarks.trainer.model_shapes import QWEN2_5_7B, SMALL

LENGTHS, SHORTEST, LONGEST = 24, 500, 4096
SMALL_LENGTHS, SMALL_SHORTEST, SMALL_LONGEST = 4, 50, 200
ROWS_PER_PACK = 4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # relative to the largest element of the output
PADDED_FRACTION = 4  # the second row is padded by a quarter of its length


@dataclass(frozen=True)
class AttentionVariant:
    """Inputs of the layer, and whether SDPA may use cuDNN."""

    name: str
    rows: str  # equal: no padding; padded: the second row is padded; packed: several rows in a sequence
    masked: bool = False  # pass the attention mask of padded rows
    cudnn: bool = True


VARIANTS = (
    AttentionVariant("no mask", "equal"),
    AttentionVariant("no mask, cuDNN off", "equal", cudnn=False),
    AttentionVariant("padding mask", "padded", masked=True),
    AttentionVariant("padding mask, cuDNN off", "padded", masked=True, cudnn=False),
    AttentionVariant("dense pack mask", "packed"),
    AttentionVariant("dense pack mask, cuDNN off", "packed", cudnn=False),
)


def check_shapes(context: CheckContext) -> None:
    """Record the mean time of the first and the second pass of every length, for every variant."""
    device = torch.device("cuda" if context.on_gpu else "cpu")
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    layer, lengths = build_layer(context, device, dtype), choose_lengths(context)
    run_pass(layer, build_inputs(VARIANTS[2], max(lengths), device), device)  # allocate memory, load cuBLAS
    recorder = AttentionRecorder()
    recorder.install()
    for variant in VARIANTS:
        if not variant.cudnn and not context.on_gpu:
            continue
        recorder.clear()
        with allow_cudnn(variant.cudnn):
            times = [measure_length(layer, variant, length, device) for length in lengths]
        first, repeated = (fmean(column) for column in zip(*times, strict=True))
        context.record(
            **{
                variant.name: {
                    "first_ms": 1000 * first,
                    "repeated_ms": 1000 * repeated,
                    "new_shape_ms": 1000 * (first - repeated),
                    "kernels": recorder.describe(),
                }
            }
        )
    recorder.uninstall()
    context.record(differences=compare_outputs(layer, device, lengths[0], tolerance=TOLERANCE[dtype]))


def choose_lengths(context: CheckContext) -> list[int]:
    """Return distinct lengths in random order."""
    count, shortest, longest = (
        (SMALL_LENGTHS, SMALL_SHORTEST, SMALL_LONGEST) if context.small else (LENGTHS, SHORTEST, LONGEST)
    )
    return random.Random(0).sample(range(shortest, longest + 1), count)


def build_layer(context: CheckContext, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    shape = SMALL if context.small else QWEN2_5_7B
    text: dict[str, Any] = {**shape.text_config, "num_hidden_layers": 1, "vocab_size": 1024}
    torch.manual_seed(0)
    with device:
        layer: torch.nn.Module = AutoModel.from_config(Qwen2Config(**text), dtype=dtype, attn_implementation="sdpa")
    return layer.train()


def build_inputs(variant: AttentionVariant, length: int, device: torch.device) -> dict[str, Any]:
    """Return the inputs of two rows, or of one pack of four rows; the rows are the same in all variants."""
    ids = torch.arange(2 * length, device=device).view(2, length) % 1024
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if variant.rows == "packed":
        positions = torch.arange(length, device=device) % (length // ROWS_PER_PACK)
        return {**inputs, "position_ids": positions.expand(2, -1)}
    if variant.masked:
        mask = torch.ones_like(ids)
        mask[1, length - length // PADDED_FRACTION :] = 0
        inputs["attention_mask"] = mask
    return inputs


def measure_length(
    layer: torch.nn.Module, variant: AttentionVariant, length: int, device: torch.device
) -> tuple[float, float]:
    """Return the seconds of the first and of the second pass with this length."""
    inputs = build_inputs(variant, length, device)
    return run_pass(layer, inputs, device), run_pass(layer, inputs, device)


def run_pass(layer: torch.nn.Module, inputs: dict[str, Any], device: torch.device) -> float:
    """Run forward and backward pass and return the seconds."""
    layer.zero_grad(set_to_none=True)
    started_at = read_clock(device)
    output: torch.Tensor = layer(**inputs).last_hidden_state
    output.float().sum().backward()  # type: ignore[no-untyped-call]
    return read_clock(device) - started_at


def read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def allow_cudnn(enabled: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(enabled and before)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@torch.no_grad()
def compare_outputs(layer: torch.nn.Module, device: torch.device, length: int, *, tolerance: float) -> dict[str, float]:
    """Return the relative differences of outputs that must be equal. Raises: CheckFailed."""
    by_name = {variant.name: variant for variant in VARIANTS}

    def compute(name: str) -> torch.Tensor:
        with allow_cudnn(by_name[name].cudnn):
            output: torch.Tensor = layer(**build_inputs(by_name[name], length, device)).last_hidden_state.float()
        return output

    real = length - length // PADDED_FRACTION  # tokens of the second row that are not padding
    plain, packed = compute("no mask"), compute("dense pack mask")
    first_row = length // ROWS_PER_PACK
    pairs = {
        "padding mask and no mask": (compute("padding mask")[1, :real], plain[1, :real]),
        "cuDNN on and off": (plain, compute("no mask, cuDNN off")),
        "packs, cuDNN on and off": (packed, compute("dense pack mask, cuDNN off")),
        "first row of a pack and alone": (packed[:, :first_row], plain[:, :first_row]),
    }
    differences = {name: float((left - right).abs().max() / right.abs().max()) for name, (left, right) in pairs.items()}
    for name, difference in differences.items():
        require(difference <= tolerance, f"{name}: outputs differ by {difference:.2e} > {tolerance:g}")
    return differences
