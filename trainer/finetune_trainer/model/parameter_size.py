"""Computes the sizes of parameters: the full ones of sharded or quantized ones, and which ones autocast casts."""

import math
from collections.abc import Iterator
from typing import Any

import torch


def get_full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of the full parameter, before sharding and quantization.

    ZeRO-3 replaces a sharded parameter with an empty tensor, and bitsandbytes packs two weights into one byte.
    """
    quantized: Any = getattr(parameter, "quant_state", None)
    shape: torch.Size = quantized.shape if quantized is not None else getattr(parameter, "ds_shape", parameter.shape)
    return shape


def get_full_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of the full parameter."""

    return math.prod(get_full_shape(parameter))


def iterate_autocast_layers(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Yield the linear layers, except for an output layer that shares its weight with embeddings.

    Autocast casts their weights in each pass, and those of embeddings and norms never.
    """
    shared = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is torch.nn.Linear and id(module.weight) not in shared:
            yield module
