"""Compute the logits of a micro-batch and the losses of its target tokens."""

from collections.abc import Callable

import torch

from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.model.supported_types import ROUTER_LOGITS_OPTION
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
    options = {ROUTER_LOGITS_OPTION: True} if receive_router_loss else {}
    targets = Targets(batch.targets.positions, batch.targets.ids)
    losses, outputs = compute_losses(model, {**batch.inputs, **options, "use_cache": False}, targets)
    if receive_router_loss:
        receive_router_loss(outputs.aux_loss)
    return losses
