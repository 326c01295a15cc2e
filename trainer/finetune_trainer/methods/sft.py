"""Supervised fine-tuning: cross entropy of the target tokens, averaged over the effective batch."""

import torch

from finetune_trainer.data.token_dataset import IGNORE_INDEX, Features
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.router_loss import RouterLossTerm, count_router_units
from finetune_trainer.training.token_losses import compute_target_losses


class SftTrainer(GlobalMeanTrainer):
    """Trainer for SFT; its loss units are weighted target tokens and, for the router loss, tokens."""

    def count_loss_units(self, batch: Features) -> tuple[float, ...]:
        """Return the sum of the weights of all target tokens and, with a router loss, the number of tokens."""
        return (float(_get_target_weights(batch).sum()), *count_router_units(self.inputs.plan.spec.training, batch))

    def sum_losses(self, model: torch.nn.Module, batch: Features) -> tuple[torch.Tensor, ...]:
        """Return the weighted sum of the cross entropy of all target tokens and, if there is one, the router loss."""
        router_loss = RouterLossTerm(self.inputs.plan.spec.training, batch, is_training=model.training)
        losses = compute_target_losses(model, batch, receive_router_loss=router_loss.receiver)
        sum_of_losses = (losses * _get_target_weights(batch)).sum() if "weights" in batch else losses.sum()
        return (sum_of_losses, *router_loss.sums)


def _get_target_weights(batch: Features) -> torch.Tensor:
    """Return the weight of every target token, (targets,)."""
    is_target = batch["labels"][:, 1:] != IGNORE_INDEX
    return batch["weights"][:, 1:][is_target] if "weights" in batch else is_target[is_target]
