"""Finds the layers whose weights autocast casts in each pass."""

from collections.abc import Iterator

import torch


def iterate_autocast_layers(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """Yield the linear layers, except for an output layer that shares its weight with embeddings.

    Autocast casts their weights in each pass, and those of embeddings and norms never.
    """
    shared = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if type(module) is torch.nn.Linear and id(module.weight) not in shared:
            yield module
