"""Compares the attention kernel for several sequences in one row with SDPA of each sequence, on a GPU."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from benchmarks.gpu_check.checks.attention import ROWS_PER_PACK, TOLERANCE, choose_lengths, read_clock
from benchmarks.gpu_check.context import CheckContext, require
from finetune_trainer.model.varlen_attention import (
    AttentionInputs,
    attend_to_each_sequence,
    can_use_kernel,
    compute_varlen_attention,
)
from finetune_trainer.varlen_inputs import build_varlen_inputs

HEADS, HEAD_DIM = 28, 128  # of a 7B model
SLIDING_WINDOW = 100


@dataclass(frozen=True)
class VarlenCase:
    """Shape of one comparison; the rest is that of a 7B model."""

    name: str
    key_heads: int = HEADS
    value_dim: int = HEAD_DIM
    sliding_window: int | None = None
    shares_prompts: bool = False  # every second row continues the first half of the row before it


CASES = (
    VarlenCase("equal heads"),
    VarlenCase("grouped heads", key_heads=4),
    VarlenCase("sliding window", key_heads=4, sliding_window=SLIDING_WINDOW),
    VarlenCase("smaller values", value_dim=HEAD_DIM // 2),
    VarlenCase("shared prompts", key_heads=4, shares_prompts=True),
    VarlenCase("shared prompts in a sliding window", key_heads=4, sliding_window=SLIDING_WINDOW, shares_prompts=True),
)


def check_varlen(context: CheckContext) -> None:
    """Compare outputs and gradients, and record the time of new and repeated lengths."""
    for case in CASES:
        differences = [compare(case, length) for length in choose_lengths(context)[:4]]
        context.record(**{case.name: {"difference": max(differences)}})
        require(max(differences) <= TOLERANCE[torch.bfloat16], f"{case.name}: results differ by {max(differences):.2e}")
    results = [measure(CASES[1], length) for length in choose_lengths(context)]
    first, repeated = (fmean(column) for column in zip(*results, strict=True))
    context.record(first_ms=1000 * first, repeated_ms=1000 * repeated)


def compare(case: VarlenCase, length: int) -> float:
    """Return the largest difference of outputs and gradients, relative to the largest element of each."""
    inputs, options = build_inputs(case, length)
    require(can_use_kernel(inputs, 0.0), "the kernel is not used on this GPU")
    actual, _ = compute_varlen_attention(torch.nn.Module(), *inputs, None, **options)
    expected = attend_to_each_sequence(inputs, options).transpose(1, 2)
    direction = torch.randn_like(expected)
    pairs = zip(
        (actual, *torch.autograd.grad(actual, inputs, direction)),
        (expected, *torch.autograd.grad(expected, inputs, direction)),
        strict=True,
    )
    return max(float((left - right).abs().max() / right.abs().max()) for left, right in pairs)


def build_inputs(case: VarlenCase, length: int) -> tuple[AttentionInputs, dict[str, Any]]:
    """Return random inputs of a pack of four rows, and the options of the attention function."""
    device, row = torch.device("cuda"), length // ROWS_PER_PACK
    lengths = [row] * (ROWS_PER_PACK - 1) + [length - row * (ROWS_PER_PACK - 1)]
    shapes = ((HEADS, HEAD_DIM), (case.key_heads, HEAD_DIM), (case.key_heads, case.value_dim))
    inputs = AttentionInputs(
        *(
            torch.randn(1, heads, length, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads, dim in shapes
        )
    )
    starts = range(0, ROWS_PER_PACK * row, row)
    prompts = [range(start - row, start - row // 2) if number % 2 else range(0) for number, start in enumerate(starts)]
    varlen_inputs = build_varlen_inputs(lengths, prompts if case.shares_prompts else None)
    options = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in varlen_inputs.items()
    }
    return inputs, {**options, "sliding_window": case.sliding_window}


def measure(case: VarlenCase, length: int) -> tuple[float, float]:
    """Return the seconds of the first and of the second pass with this length, forward and backward."""
    inputs, options = build_inputs(case, length)
    durations = []
    for _ in range(2):
        started_at = read_clock(torch.device("cuda"))
        output, _ = compute_varlen_attention(torch.nn.Module(), *inputs, None, **options)
        output.float().sum().backward()  # type: ignore[no-untyped-call]
        durations.append(read_clock(torch.device("cuda")) - started_at)
    return durations[0], durations[1]
