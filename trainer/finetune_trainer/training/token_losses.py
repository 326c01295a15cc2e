"""Compute the logits of a micro-batch and the losses of its target tokens."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.model.supported_types import ROUTER_LOGITS_OPTION, ROUTER_LOSS_FUNCTION
from finetune_trainer.model.tiled_losses import Targets, compute_losses

RouterLossReceiver = Callable[[torch.Tensor], None]  # called with the auxiliary loss of a micro-batch, a scalar


def compute_logits(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return the logits of a micro-batch, shape (batch, seq, vocab)."""
    logits: torch.Tensor = model(**batch.inputs, use_cache=False).logits
    return logits


def compute_target_losses(
    model: torch.nn.Module, batch: MicroBatch, *, receive_router_loss: RouterLossReceiver | None = None
) -> torch.Tensor:
    """Return the cross entropy of every target token in float32, shape (targets,), ordered by sequence and position.

    receive_router_loss: if set, the model also computes the auxiliary loss that balances its experts.
    Logits are computed for target tokens only, a tile at a time. The loss of the model is not used: not every model
    divides by num_items_in_batch.
    """
    targets = Targets(batch.targets.positions, batch.targets.ids)
    inputs = {**batch.inputs, "use_cache": False}
    if receive_router_loss is None:
        return compute_losses(model, inputs, targets)[0]
    with _mask_router_loss(model, batch.pack_mask):
        losses, outputs = compute_losses(model, {**inputs, ROUTER_LOGITS_OPTION: True}, targets)
    receive_router_loss(outputs.aux_loss)
    return losses


@contextmanager
def _mask_router_loss(model: torch.nn.Module, mask: torch.Tensor | None) -> Iterator[None]:
    """Let the auxiliary loss of the model exclude the tokens that are 0 in the mask, (batch, seq).

    The model would read the attention mask, which packs do not have: transformers isolates their rows only without it.
    """
    if mask is None:
        yield
        return
    module = _find_router_loss_module(model)
    compute = getattr(module, ROUTER_LOSS_FUNCTION)

    @wraps(compute)
    def compute_with_mask(*arguments: Any) -> Any:
        return compute(*arguments[:-1], mask)  # the attention mask is the last argument

    setattr(module, ROUTER_LOSS_FUNCTION, compute_with_mask)
    try:
        yield
    finally:
        setattr(module, ROUTER_LOSS_FUNCTION, compute)


def _find_router_loss_module(model: Any) -> Any:
    """Return the Python module whose function computes the auxiliary loss of a model, also if the model is wrapped."""
    model = getattr(model, "module", model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    modules = (sys.modules[base_class.__module__] for base_class in type(base).__mro__)  # FSDP2 derives a class
    return next(module for module in modules if hasattr(module, ROUTER_LOSS_FUNCTION))
