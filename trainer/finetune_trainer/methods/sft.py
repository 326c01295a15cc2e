"""Supervised fine-tuning: cross entropy of the target tokens, averaged over the effective batch."""

import torch

from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.router_loss import RouterLossTerm, count_router_units
from finetune_trainer.training.token_losses import compute_target_losses


class SftTrainer(GlobalMeanTrainer):
    """Trainer for SFT; its loss units are weighted target tokens and, for the router loss, tokens."""

    def count_loss_units(self, batch: MicroBatch) -> tuple[float, ...]:
        """Return the sum of the weights of all target tokens and, with a router loss, the number of tokens."""
        weights = batch.targets.weights
        units = float(len(batch.targets.ids) if weights is None else weights.sum())
        return (units, *count_router_units(self.inputs.plan.spec.training, batch))

    def sum_losses(self, model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Return the weighted sum of the cross entropy of all target tokens and, if there is one, the router loss."""
        router_loss = RouterLossTerm(self.inputs.plan.spec.training, batch, is_training=model.training)
        losses = compute_target_losses(model, batch, receive_router_loss=router_loss.receiver)
        weights = batch.targets.weights
        return ((losses if weights is None else losses * weights).sum(), *router_loss.sums)
