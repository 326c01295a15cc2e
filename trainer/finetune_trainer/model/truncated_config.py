"""Configs with fewer layers, to build a small model with the architecture of a large one."""

import copy

from transformers import PretrainedConfig


def truncate_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a copy of the config with the first `layers` layers; per-layer lists are truncated too."""
    truncated = copy.deepcopy(config)
    text = truncated.get_text_config()
    for name in per_layer_fields(text):
        setattr(text, name, getattr(text, name)[:layers])
    text.num_hidden_layers = layers
    return truncated


def per_layer_fields(text: PretrainedConfig) -> list[str]:
    """Return the names of the config fields that are lists with one entry per layer."""
    layers = text.num_hidden_layers
    return [name for name, value in vars(text).items() if isinstance(value, list | tuple) and len(value) == layers]
