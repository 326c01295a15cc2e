"""Computes the full sizes of parameters that ZeRO-3 shards or bitsandbytes quantizes."""

import math
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
