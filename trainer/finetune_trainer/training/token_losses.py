"""Compute the logits of a micro-batch and the losses of its target tokens."""

from collections.abc import Callable

import torch

from finetune_trainer.data.packing import MROPE_POSITION_IDS, POSITION_IDS
from finetune_trainer.data.token_dataset import IGNORE_INDEX, Features
from finetune_trainer.model.supported_types import ROUTER_LOGITS_OPTION
from finetune_trainer.vision.processor import VISION_INPUTS

RouterLossReceiver = Callable[[torch.Tensor], None]  # called with the auxiliary loss of a micro-batch, a scalar


def compute_logits(
    model: torch.nn.Module, batch: Features, *, receive_router_loss: RouterLossReceiver | None = None
) -> torch.Tensor:
    """Return the logits of a micro-batch, shape (batch, seq, vocab).

    receive_router_loss: if set, the model also computes the auxiliary loss that balances its experts.
    Packed rows have position ids but no attention mask, because transformers isolates rows by position ids only if
    there is neither a mask nor a cache. Padding is on the right, so causal attention needs no mask for it.
    """
    isolation = POSITION_IDS if POSITION_IDS in batch else "attention_mask"
    inputs = {name: batch[name] for name in ("input_ids", isolation, *VISION_INPUTS) if name in batch}
    # M-RoPE position ids: (4, batch, seq); the first entry contains the text positions, which isolate the rows.
    if MROPE_POSITION_IDS in batch:
        inputs[POSITION_IDS] = torch.cat((batch[POSITION_IDS].unsqueeze(0), batch[MROPE_POSITION_IDS].permute(2, 0, 1)))
    options = {ROUTER_LOGITS_OPTION: True} if receive_router_loss else {}
    outputs = model(**inputs, **options, use_cache=False)
    if receive_router_loss:
        receive_router_loss(outputs.aux_loss)
    logits: torch.Tensor = outputs.logits
    return logits


def compute_target_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of every target token, shape (targets,).

    logits: (batch, seq, vocab). labels: (batch, seq), -100 is ignored. Only the logits of targets are cast to float32,
    so prompts use no float32 memory. The loss of the model is not used: not every model divides by num_items_in_batch.
    """
    targets = labels[:, 1:]
    is_target = targets != IGNORE_INDEX
    return torch.nn.functional.cross_entropy(logits[:, :-1][is_target].float(), targets[is_target], reduction="none")
