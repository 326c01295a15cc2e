"""Checks torch's attention for sequences of different lengths (varlen) with packed rows, on a GPU."""

import inspect
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from benchmarks.gpu_check.checks.attention import ROWS_PER_PACK, TOLERANCE, choose_lengths, read_clock
from benchmarks.gpu_check.context import CheckContext, require

HEADS, HEAD_DIM = 28, 128  # of a 7B model


def check_varlen(context: CheckContext) -> None:
    """Compare packs of four rows with SDPA for the first row, and record the time of new and repeated lengths."""
    from torch.nn.attention import varlen

    options = build_causal_options(varlen.varlen_attn)

    def attend(query: Any, key: Any, value: Any, starts: torch.Tensor, longest: int) -> torch.Tensor:
        output: Any = varlen.varlen_attn(query, key, value, starts, starts, longest, longest, **options)
        attended: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return attended

    results = [measure_pack(attend, length) for length in choose_lengths(context)]
    first, repeated, differences = zip(*results, strict=True)
    context.record(first_ms=1000 * fmean(first), repeated_ms=1000 * fmean(repeated), difference=max(differences))
    require(max(differences) <= TOLERANCE[torch.bfloat16], f"outputs differ by {max(differences):.2e}")


def build_causal_options(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the argument that makes attention causal, which has another name in older versions of torch."""
    return {"is_causal": True} if "is_causal" in inspect.signature(function).parameters else {"window_size": (-1, 0)}


def measure_pack(attend: Callable[..., torch.Tensor], length: int) -> tuple[float, float, float]:
    """Return the seconds of two passes over a pack, and the relative difference of its first row to SDPA."""
    device, row = torch.device("cuda"), length // ROWS_PER_PACK
    query, key, value = (
        torch.randn(length, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    starts = torch.tensor([*range(0, row * ROWS_PER_PACK, row), length], device=device, dtype=torch.int32)
    durations = []
    for _ in range(2):
        started_at = read_clock(device)
        output = attend(query, key, value, starts, length - row * (ROWS_PER_PACK - 1))
        output.float().sum().backward()  # type: ignore[no-untyped-call]
        durations.append(read_clock(device) - started_at)
    first, repeated = durations
    rows = [tensor[:row].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value, output)]
    expected = torch.nn.functional.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True)
    return first, repeated, float((rows[3] - expected).abs().max() / expected.abs().max())
