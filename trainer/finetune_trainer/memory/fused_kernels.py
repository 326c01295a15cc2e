"""Attention and dropout as the fused kernels of a GPU hold them, whatever the machine that forecasts has."""

from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

_NAME = "finetune_forecast"
_FUSED = ("sdpa", "flash_attention_2", "flash_attention_3")


def use_fused_attention(model: Any, *, packed: bool) -> None:
    """In the place of torch's own. An implementation that is not fused stays: it shows its matrices by itself."""
    if model.config._attn_implementation in _FUSED:
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, partial(_mask, packed=packed))
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.set_attn_implementation(_NAME)


def _mask(
    batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, *, packed: bool, **_: Any
) -> torch.Tensor | None:
    """One sample needs none. Several are padded, rows of a pack are kept apart, and a short window is said, too."""
    if batch_size == 1 and not packed and (local_size is None or kv_length < local_size):
        return None
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """With a mask, keys and values are repeated for every head, as transformers does for CUDA."""
    if attention_mask is not None:
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    result = _Attention.apply(query, key, value, attention_mask)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).contiguous(), None


def use_fused_dropout(model: torch.nn.Module) -> None:
    """It keeps a byte per number for the backward pass; on CPU torch keeps a factor in the number's own type."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.forward = partial(_drop, module)  # type: ignore[method-assign]


def _drop(module: torch.nn.Dropout, numbers: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(numbers, module.p, train=True)[0] if module.training and module.p > 0 else numbers


class _Attention(torch.autograd.Function):
    """Keeps its inputs, its result and a number per row; the backward pass adds up in float32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        result = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        bias = None if mask is None else torch.empty_like(mask, dtype=query.dtype)
        ctx.save_for_backward(query, key, value, result, sums, bias)
        return result

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        query, key, value, _result, sums, _bias = ctx.saved_tensors
        added_up = torch.empty_like(query, dtype=torch.float32)
        per_row = torch.empty_like(sums)
        per_head = query.new_empty(2, *query.shape) if query.shape[1] > key.shape[1] else None
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
        del added_up, per_row, per_head
        return gradients
