"""Gives a model on the meta device fake weights, with which it can compute shapes and gradients without memory."""

from typing import Any

import torch


def replace_meta_tensors(model: torch.nn.Module) -> None:
    """Replace meta tensors by fake tensors, because autocast ignores meta tensors. Tied parameters stay tied.

    Call it inside a FakeTensorMode.
    """
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in fakes:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            registry: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            registry[name] = fakes[id(tensor)]
