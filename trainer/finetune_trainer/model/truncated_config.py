"""A model's config with fewer layers, for a small model that stands in for a large one."""

import copy

from transformers import PretrainedConfig


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Lists with an entry per layer are cut, too."""
    fewer = copy.deepcopy(config)
    text = fewer.get_text_config()
    for name in per_layer(text):
        setattr(text, name, getattr(text, name)[:layers])
    text.num_hidden_layers = layers
    return fewer


def per_layer(text: PretrainedConfig) -> list[str]:
    layers = text.num_hidden_layers
    return [name for name, value in vars(text).items() if isinstance(value, list | tuple) and len(value) == layers]
