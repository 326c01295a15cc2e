"""How large parameters are that are not there as a whole."""

import math
from typing import Any

import torch


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """ZeRO-3 leaves an empty tensor on the rank, and bitsandbytes makes bytes of two weights each."""
    quantized: Any = getattr(parameter, "quant_state", None)
    shape: torch.Size = quantized.shape if quantized is not None else getattr(parameter, "ds_shape", parameter.shape)
    return shape


def whole_size(parameter: torch.Tensor) -> int:
    """Numbers in it."""
    return math.prod(whole_shape(parameter))
