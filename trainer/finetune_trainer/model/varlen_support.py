"""Finds out whether a model can be trained with attention over several sequences in one row (decisions/527)."""

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
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def find_varlen_obstacle(config: PretrainedConfig, *, text_only: bool) -> str | None:
    """Return why the model cannot be trained with attention over several sequences in one row; None if it can.

    Runs the model with fake weights. All its layers must pass the lengths of the sequences to the attention function.
    """
    family = None if text_only else FAMILIES.get(config.model_type)
    if family is not None and family.packing_problem is not None:
        return f"the model {family.packing_problem}"
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if unsupported := sorted(layer_types - _LAYER_TYPES):
        return f"the model has layers of {unsupported[0].replace('_', ' ')}"
    try:
        layer_count, call_count = _count_attention_calls(config, uses_mrope=family is not None and family.uses_mrope)
    except Exception as error:  # any model code may fail with arguments that it does not know, or on fake tensors
        return f"a trial failed: {first_line(error)}"
    if call_count != layer_count:
        return f"only {call_count} of {layer_count} layers use the attention function"
    return None


def select_text_attention(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """Return the argument of transformers that sets this implementation for the text part of a model only."""
    text_config = config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text_config]
    return dict.fromkeys(keys, name) or name


def _count_attention_calls(config: PretrainedConfig, *, uses_mrope: bool) -> tuple[int, int]:
    """Return the number of layers of a truncated model, and how often they call the attention function."""
    truncated = truncate_layers(config, _count_layers_of_all_types(config))
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
    return int(truncated.get_text_config().num_hidden_layers), len(calls)


def _count_layers_of_all_types(config: PretrainedConfig) -> int:
    """Return how many of the first layers contain a layer of each type."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or [""]
    return 1 + max(layer_types.index(layer_type) for layer_type in set(layer_types))


def _register_probe() -> list[None]:
    """Register an attention implementation that records its calls in the returned list."""
    calls: list[None] = []

    def compute(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return compute_varlen_attention(*args, **kwargs)

    AttentionInterface.register(_PROBE, compute)
    return calls
