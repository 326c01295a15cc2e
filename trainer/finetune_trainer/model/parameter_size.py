"""Full shapes of parameters that are sharded by ZeRO-3 or packed by bitsandbytes."""

import math
from typing import Any

import torch


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the unsharded shape: ZeRO-3 leaves an empty tensor, and bitsandbytes packs two weights into a byte."""
    quantized: Any = getattr(parameter, "quant_state", None)
    shape: torch.Size = quantized.shape if quantized is not None else getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_numel(parameter: torch.Tensor) -> int:
    """Return the elements of the full, unsharded parameter."""

    return math.prod(full_shape(parameter))
