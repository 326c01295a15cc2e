"""Creates configs with fewer layers, which define small models with the architecture of a large model."""

import copy

from transformers import PretrainedConfig


def truncate_layers(config: PretrainedConfig, layer_count: int) -> PretrainedConfig:
    """Return a copy of the config with the first `layer_count` layers, and shorten lists with one entry per layer."""
    truncated = copy.deepcopy(config)
    text_config = truncated.get_text_config()
    for name in find_per_layer_fields(text_config):
        setattr(text_config, name, getattr(text_config, name)[:layer_count])
    text_config.num_hidden_layers = layer_count
    return truncated


def find_per_layer_fields(text_config: PretrainedConfig) -> list[str]:
    """Return the names of the config fields that are lists with one entry per layer."""
    layer_count = text_config.num_hidden_layers
    fields = vars(text_config).items()
    return [name for name, value in fields if isinstance(value, list | tuple) and len(value) == layer_count]
