"""Compute the logits of a micro-batch and the losses of its target tokens."""

from collections.abc import Callable
from typing import Any

import torch

from finetune_trainer.data.packing import MROPE_POSITION_IDS, POSITION_IDS
from finetune_trainer.data.token_dataset import IGNORE_INDEX, Features
from finetune_trainer.model.supported_types import ROUTER_LOGITS_OPTION
from finetune_trainer.model.tiled_losses import Targets, compute_losses
from finetune_trainer.vision.processor import VISION_INPUTS

RouterLossReceiver = Callable[[torch.Tensor], None]  # called with the auxiliary loss of a micro-batch, a scalar


def compute_logits(model: torch.nn.Module, batch: Features) -> torch.Tensor:
    """Return the logits of a micro-batch, shape (batch, seq, vocab)."""
    logits: torch.Tensor = model(**_build_inputs(batch)).logits
    return logits


def compute_target_losses(
    model: torch.nn.Module, batch: Features, *, receive_router_loss: RouterLossReceiver | None = None
) -> torch.Tensor:
    """Return the cross entropy of every target token in float32, shape (targets,), ordered by row and position.

    receive_router_loss: if set, the model also computes the auxiliary loss that balances its experts.
    Logits are computed for target tokens only, a tile at a time. The loss of the model is not used: not every model
    divides by num_items_in_batch.
    """
    options = {ROUTER_LOGITS_OPTION: True} if receive_router_loss else {}
    losses, outputs = compute_losses(model, {**_build_inputs(batch), **options}, find_targets(batch["labels"]))
    if receive_router_loss:
        receive_router_loss(outputs.aux_loss)
    return losses


def find_targets(labels: torch.Tensor) -> Targets:
    """Return the target tokens of labels, (batch, seq); -100 is ignored. The first token of a row is no target."""
    next_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    positions = (next_labels != IGNORE_INDEX).nonzero()[:, 0]
    return Targets(positions, next_labels[positions])


def _build_inputs(batch: Features) -> dict[str, Any]:
    """Return the arguments of the model's forward pass.

    Packed rows have position ids but no attention mask, because transformers isolates rows by position ids only if
    there is neither a mask nor a cache. Padding is on the right, so causal attention needs no mask for it.
    """
    isolation = POSITION_IDS if POSITION_IDS in batch else "attention_mask"
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", isolation, *VISION_INPUTS) if name in batch}
    # M-RoPE position ids: (4, batch, seq); the first entry contains the text positions, which isolate the rows.
    if MROPE_POSITION_IDS in batch:
        inputs[POSITION_IDS] = torch.cat((batch[POSITION_IDS].unsqueeze(0), batch[MROPE_POSITION_IDS].permute(2, 0, 1)))
    return {**inputs, "use_cache": False}
