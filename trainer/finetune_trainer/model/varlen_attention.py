"""Attention over several sequences in one row, without padding and masks (decisions/527).

On GPUs it is the FlashAttention kernel that torch contains (`varlen_attn`), elsewhere SDPA of one sequence at a time.
"""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from finetune_trainer.varlen_inputs import KEY_POSITIONS, SEQUENCE_LENGTHS, SequenceLengths

VARLEN = "varlen"  # value of attn_implementation in transformers, once it is registered
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_MAX_KERNEL_HEAD_DIM, _KERNEL_HEAD_DIM_MULTIPLE = 256, 8
_MIN_KERNEL_CAPABILITY = (8, 0)  # compute capability of the GPU
_KERNEL_PARAMETERS = inspect.signature(varlen_attn).parameters  # they depend on the version of torch
_KERNEL_ACCEPTS_GROUPED_HEADS = "enable_gqa" in _KERNEL_PARAMETERS
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments that change attention, such as gpt-oss's sinks


class AttentionInputs(NamedTuple):
    """Query, key and value, each (1, heads, tokens, head size); key and value may have fewer heads."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def compute_varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the causal self-attention of each sequence, (1, tokens, heads, value head size).

    Implements the interface of transformers' attention functions. options: the arguments that `build_varlen_inputs`
    returns, `scaling`, `dropout`, and `sliding_window`, the number of tokens to which a token attends, including
    itself. Raises: ValueError, if an option is missing or changes attention in another way.
    """
    _check_options(module, attention_mask, options)
    inputs = AttentionInputs(*_cast_for_autocast(query, key, value))
    if can_use_kernel(inputs, options.get("dropout", 0.0)):
        return _run_kernel(inputs, options), None
    return attend_to_each_sequence(inputs, options).transpose(1, 2).contiguous(), None


# Compiled layers call it between two graphs (decisions/533).
AttentionInterface.register(VARLEN, torch.compiler.disable(compute_varlen_attention))  # type: ignore[no-untyped-call]


def attend_to_each_sequence(inputs: AttentionInputs, options: dict[str, Any]) -> torch.Tensor:
    """Compute SDPA of one sequence at a time; returns (1, heads, tokens, value head size)."""
    sliding_window, outputs = options.get("sliding_window"), []
    for query, key, value in _split(inputs, options[SEQUENCE_LENGTHS]):
        mask = _build_mask(query, key.shape[2], sliding_window)
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=options.get("dropout", 0.0),
            is_causal=mask is None,
            scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def _split(inputs: AttentionInputs, lengths: SequenceLengths) -> Iterator[AttentionInputs]:
    """Yield query, key and value of each sequence; keys and values include those of its prefix."""
    split = (torch.split(tensor, list(lengths.values), dim=2) for tensor in inputs)
    for number, (query, key, value) in enumerate(zip(*split, strict=True)):
        prefix = lengths.prefixes[number] if lengths.prefixes else range(0)
        if prefix:
            key, value = (
                torch.cat((tensor[:, :, prefix.start : prefix.stop], own), dim=2)
                for tensor, own in ((inputs.key, key), (inputs.value, value))
            )
        yield AttentionInputs(query, key, value)


def can_use_kernel(inputs: AttentionInputs, dropout: float) -> bool:
    """Return whether torch's kernel can compute this attention."""
    query, head_dim = inputs.query, inputs.query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in _KERNEL_DTYPES
        and inputs.value.shape[-1] <= head_dim <= _MAX_KERNEL_HEAD_DIM
        and head_dim % _KERNEL_HEAD_DIM_MULTIPLE == 0
        and dropout == 0.0
        and _has_kernel(query.device.index)
    )


@cache
def _has_kernel(device_index: int | None) -> bool:
    is_recent = torch.cuda.get_device_capability(device_index) >= _MIN_KERNEL_CAPABILITY
    return is_recent and "window_size" in _KERNEL_PARAMETERS


def _run_kernel(inputs: AttentionInputs, options: dict[str, Any]) -> torch.Tensor:
    """Compute attention with torch's kernel; returns (1, tokens, heads, value head size).

    If a sequence has more keys than queries, the kernel aligns the last key with the last query.
    """
    query, key, value = inputs
    if KEY_POSITIONS in options:
        key, value = (tensor.index_select(2, options[KEY_POSITIONS]) for tensor in (key, value))
    head_dim, value_head_dim = query.shape[-1], value.shape[-1]
    value = torch.nn.functional.pad(value, (0, head_dim - value_head_dim))
    if not _KERNEL_ACCEPTS_GROUPED_HEADS:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    sliding_window = options.get("sliding_window")
    attend: Any = varlen_attn
    attended: torch.Tensor = attend(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        options["cu_seq_lens_q"],
        options["cu_seq_lens_k"],
        options["max_length_q"],
        options["max_length_k"],
        scale=options.get("scaling"),
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **({"enable_gqa": True} if _KERNEL_ACCEPTS_GROUPED_HEADS else {}),
    )
    return attended[..., :value_head_dim].unsqueeze(0)


def _check_options(module: torch.nn.Module, attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    if SEQUENCE_LENGTHS not in options:
        raise ValueError("the model does not pass the lengths of the sequences to its attention")
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("a mask")
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unsupported.append("attention in both directions")
    if unsupported:
        raise ValueError(f"attention without padding does not support {unsupported[0]}")


def _cast_for_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast the tensors as autocast does for SDPA; norms with float32 weights return float32."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _build_mask(query: torch.Tensor, key_count: int, sliding_window: int | None) -> torch.Tensor | None:
    """Return a mask (queries, keys) for a prefix or a sliding window; None if causal attention needs none."""
    query_count = query.shape[2]
    exceeds_window = sliding_window is not None and key_count > sliding_window
    if query_count == key_count and not exceeds_window:
        return None
    offset = key_count - query_count  # the last query is at the position of the last key
    mask = torch.ones(query_count, key_count, dtype=torch.bool, device=query.device).tril(offset)
    return mask.triu(offset + 1 - sliding_window) if sliding_window is not None and exceeds_window else mask
