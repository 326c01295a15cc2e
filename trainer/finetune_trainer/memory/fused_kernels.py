"""Fake attention and dropout that allocate the same memory as fused GPU kernels, also on hosts without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

_NAME = "finetune_forecast"
_FUSED = ("sdpa", "flash_attention_2", "flash_attention_3")


class MaskUse(StrEnum):
    """When fused attention gets a mask."""

    NEVER = "never"  # the lengths of the sequences are arguments
    WINDOWS = "windows"  # if a row is longer than a sliding window
    PADDED_ROWS = "padded_rows"  # as for windows, and if rows are padded to equal length
    PACKS = "packs"  # always, to isolate the rows of a pack


def use_fused_attention(model: Any, mask_use: MaskUse) -> None:
    """Replace fused attention by a function that only allocates memory; eager attention needs no replacement."""
    if model.config.get_text_config()._attn_implementation in _FUSED:
        AttentionInterface.register(_NAME, _attention_forward)
        AttentionMaskInterface.register(_NAME, partial(_build_mask, mask_use=mask_use))
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.set_attn_implementation(_NAME)


def _build_mask(
    batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, *, mask_use: MaskUse, **_: Any
) -> torch.Tensor | None:
    """Return the mask of a layer, or None if attention uses none. local_size: size of a sliding window."""
    reaches_window = local_size is not None and kv_length >= local_size
    is_padded = mask_use is MaskUse.PADDED_ROWS and batch_size > 1
    if mask_use is MaskUse.NEVER or not (mask_use is MaskUse.PACKS or is_padded or reaches_window):
        return None
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)


def _attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Allocate the tensors of attention; with a mask, repeat keys and values per head, as transformers does on CUDA."""
    if attention_mask is not None:
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    output = _FusedAttention.apply(query, key, value, attention_mask)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


def use_fused_dropout(model: torch.nn.Module) -> None:
    """Replace dropout by its CUDA variant, which saves one byte per element; CPU dropout saves a factor per element."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.forward = partial(_dropout_forward, module)  # type: ignore[method-assign]


def _dropout_forward(module: torch.nn.Dropout, inputs: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(inputs, module.p, train=True)[0] if module.training and module.p > 0 else inputs


@contextmanager
def use_portable_experts() -> Iterator[None]:
    """Compute fused experts with the fallback of transformers in the `with` block.

    It allocates the same inputs, outputs and gradients as torch's grouped matrix product, which accepts only bfloat16
    if tensors are fake.
    """
    can_use_grouped_mm = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = can_use_grouped_mm


class _FusedAttention(torch.autograd.Function):
    """Attention that only allocates memory; saves float32 logsumexp and accumulates gradients in float32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        logsumexp = query.new_empty(batch, heads, length, dtype=torch.float32)
        bias = None if mask is None else torch.empty_like(mask, dtype=query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp, bias)
        return output

    @staticmethod
    def backward(ctx: Any, _grad_output: torch.Tensor) -> Any:
        query, key, value, _output, logsumexp, _bias = ctx.saved_tensors
        accumulator = torch.empty_like(query, dtype=torch.float32)
        row_buffer = torch.empty_like(logsumexp)
        per_head = query.new_empty(2, *query.shape) if query.shape[1] > key.shape[1] else None
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
        del accumulator, row_buffer, per_head
        return gradients
