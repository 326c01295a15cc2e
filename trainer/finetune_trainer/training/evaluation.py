"""Compute the mean loss over the evaluation samples, independent of the number of ranks."""

from collections.abc import Callable

import torch

from finetune_trainer.data.batch_sampler import BatchSampler, RankDataLoader, build_dataloader
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.load import SampleDataset
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.training.trainer_inputs import TrainerInputs


def build_evaluation_dataloader(inputs: TrainerInputs, samples: SampleDataset) -> RankDataLoader:
    """Build this rank's data loader for the evaluation samples, longest first."""
    assert inputs.data.eval is not None  # transformers evaluates only if there is an evaluation dataset
    order = RowOrder(inputs.data.eval.lengths, seed=None)
    sampler = BatchSampler(order, inputs.plan.eval_batch, rank=inputs.ranks.rank)
    return build_dataloader(samples, sampler, inputs.collate, worker_count=0)


@torch.no_grad()
def compute_evaluation_loss(
    inputs: TrainerInputs, samples: SampleDataset, sum_micro_batch: Callable[[Features], torch.Tensor]
) -> float:
    """Return the mean loss per unit, summed over the loss terms (collective).

    sum_micro_batch: returns the summed losses and the unit counts of a micro-batch, shape (2, terms).
    """
    local_sums = []
    for micro_batch in build_evaluation_dataloader(inputs, samples):
        local_sums.append(sum_micro_batch(micro_batch))
        inputs.heartbeat.touch()
    global_sums = torch.stack(local_sums).sum(dim=0)
    torch.distributed.all_reduce(global_sums)
    global_losses, global_units = global_sums[0], global_sums[1]
    return float((global_losses / global_units).sum())
