"""Finds the vision, audio and speech towers of a model in its config, and the class that builds the model with them."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

_TOWER_CONFIG = re.compile(r"vision|image|video|audio|speech|talker|token2wav|code2wav")


def choose_auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads a model with all its parts.

    AutoModelForCausalLM would load a model with a vision tower, such as Qwen3.5, without the tower (decisions/605).
    """
    return AutoModelForMultimodalLM if find_towers(config) else AutoModelForCausalLM


def build_on_meta(config: PretrainedConfig, **options: Any) -> Any:
    """Build the model with all its parts on the meta device, without weights. options: arguments of `from_config`."""
    config = copy.deepcopy(config)  # from_config changes it
    with torch.device("meta"):
        return choose_auto_class(config).from_config(config, **options)


def find_towers(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the paths of the sub-configs of towers, such as vision_config or thinker_config.audio_config.

    A multimodal model type whose towers have no sub-config of such a name, such as fuyu, is reported by its type.
    """
    towers = tuple(_iterate_towers(config))
    declared = any(_TOWER_CONFIG.search(name) for name in type(config).sub_configs)
    if towers or declared or config.model_type not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return towers
    return (config.model_type,)


def _iterate_towers(config: PretrainedConfig) -> Iterator[str]:
    for name, value in vars(config).items():
        if not isinstance(value, PretrainedConfig):
            continue
        if _TOWER_CONFIG.search(name):
            yield name
        else:
            yield from (f"{name}.{tower}" for tower in _iterate_towers(value))
