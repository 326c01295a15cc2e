"""Finds out whether a model can be trained with attention over several sequences in one row (decisions/527)."""

import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PretrainedConfig

from finetune_trainer.errors import first_line
from finetune_trainer.model.fake_weights import replace_meta_tensors
from finetune_trainer.model.truncated_config import truncate_layers
from finetune_trainer.model.varlen_attention import compute_varlen_attention
from finetune_trainer.varlen_inputs import build_varlen_inputs
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.towers import build_on_meta

_PROBE = "varlen_probe"
_PROBE_LENGTHS = (2, 2)  # tokens of each sequence
_PROBE_WINDOW = 2  # tokens, instead of those of the config
_SLIDING = "sliding_attention"
_LAYER_TYPES = {"full_attention", _SLIDING}
_WINDOW_FIELD = re.compile(r"(window|window_size|window_len|chunk_size|block_size)$")  # of a config, in tokens


def find_varlen_obstacle(config: PretrainedConfig, *, text_only: bool) -> str | None:
    """Return why the model cannot be trained with attention over several sequences in one row; None if it can.

    Runs the model with fake weights. All its layers must pass the lengths of the sequences to the attention function,
    and those with a sliding window also the window, because there is no mask that contains it.
    """
    family = None if text_only else FAMILIES.get(config.model_type)
    if family is not None and family.packing_problem is not None:
        return f"the model {family.packing_problem}"
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if unsupported := sorted(layer_types - _LAYER_TYPES):
        return f"the model has layers of {unsupported[0].replace('_', ' ')}"
    try:
        layers, calls = _run_trial(config, uses_mrope=family is not None and family.uses_mrope)
    except Exception as error:  # any model code may fail with arguments that it does not know, or on fake tensors
        return f"a trial failed: {first_line(error)}"
    if len(calls) != len(layers):
        return f"only {len(calls)} of {len(layers)} layers use the attention function"
    windows = [_PROBE_WINDOW if is_sliding else None for is_sliding in layers]
    if calls != windows:
        wrong = next(index for index, pair in enumerate(zip(calls, windows, strict=True)) if len({*pair}) > 1)
        return f"layer {wrong} does not pass its sliding window to the attention function"
    return None


def select_text_attention(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """Return the argument of transformers that sets this implementation for the text part of a model only."""
    text_config = config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text_config]
    return dict.fromkeys(keys, name) or name


def _run_trial(config: PretrainedConfig, *, uses_mrope: bool) -> tuple[list[bool], list[int | None]]:
    """Return which layers of a truncated model have a sliding window, and the window of each call of the function."""
    truncated = truncate_layers(config, _count_layers_of_all_types(config))
    layers = _shorten_windows(truncated.get_text_config())
    calls = _register_probe()
    attention = select_text_attention(truncated, _PROBE)
    model = build_on_meta(truncated, dtype=torch.bfloat16, attn_implementation=attention)
    if not model._supports_flash_attn:
        raise ValueError("the model does not support FlashAttention")
    with FakeTensorMode():
        replace_meta_tensors(model)
        ids = torch.zeros(1, sum(_PROBE_LENGTHS), dtype=torch.int64)
        positions = torch.cat([torch.arange(length) for length in _PROBE_LENGTHS]).unsqueeze(0)
        model(
            input_ids=ids,
            position_ids=positions.expand(4, 1, -1) if uses_mrope else positions,
            use_cache=False,
            **build_varlen_inputs(_PROBE_LENGTHS),
        )
    return layers, calls


def _shorten_windows(text_config: PretrainedConfig) -> list[bool]:
    """Set all windows, chunks and blocks to that of the trial. Return which layers have a sliding window."""
    fields = [name for name, value in vars(text_config).items() if _WINDOW_FIELD.search(name) and type(value) is int]
    for name in fields:
        setattr(text_config, name, _PROBE_WINDOW)
    layer_types = getattr(text_config, "layer_types", None)
    default = _SLIDING if "sliding_window" in fields else ""
    return [layer_type == _SLIDING for layer_type in layer_types or [default] * text_config.num_hidden_layers]


def _count_layers_of_all_types(config: PretrainedConfig) -> int:
    """Return how many of the first layers contain a layer of each type."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or [""]
    return 1 + max(layer_types.index(layer_type) for layer_type in set(layer_types))


def _register_probe() -> list[int | None]:
    """Register an attention implementation that records the window of each call in the returned list."""
    calls: list[int | None] = []

    def compute(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.get("sliding_window"))
        return compute_varlen_attention(*args, **kwargs)

    AttentionInterface.register(_PROBE, compute)
    return calls
