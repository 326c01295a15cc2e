"""Auxiliary load-balancing loss of a mixture-of-experts model as a term of the training loss (decisions/522)."""

import torch

from finetune_api.v1alpha1.training import Training
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.training.token_losses import RouterLossReceiver


def count_router_units(training: Training, batch: MicroBatch) -> tuple[float, ...]:
    """Return the loss units of the router loss, which are tokens without padding and fillers; () without that loss."""
    return () if training.router_aux_loss_coef is None else (float(batch.real_token_count),)


class RouterLossTerm:
    """Receives the auxiliary loss of one micro-batch, and weights it.

    The auxiliary loss is a product of means over the tokens of a micro-batch (arXiv 2101.03961, equations 4 to 6). The
    loss of a step is the mean over its micro-batches, weighted by their numbers of tokens.
    """

    def __init__(self, training: Training, batch: MicroBatch, *, is_training: bool) -> None:
        self._coefficient = training.router_aux_loss_coef
        self._batch = batch
        self._is_training = is_training
        self._loss: torch.Tensor | None = None

    @property
    def receiver(self) -> RouterLossReceiver | None:
        """The function that receives the auxiliary loss from the forward pass; None without that loss."""
        return None if self._coefficient is None else self._receive

    @property
    def sums(self) -> tuple[torch.Tensor, ...]:
        """The weighted loss, summed over its units, as a scalar; () without that loss."""
        if self._coefficient is None or self._loss is None:
            return ()
        # Evaluations compare models by their answers only.
        weight = self._coefficient * self._batch.real_token_count if self._is_training else 0.0
        return (weight * self._loss,)

    def _receive(self, loss: torch.Tensor) -> None:
        self._loss = loss
