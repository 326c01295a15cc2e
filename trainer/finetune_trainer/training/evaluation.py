"""Compute the mean loss over the evaluation samples, independent of the number of ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from finetune_trainer.data.batch_sampler import BatchSampler, RankDataLoader, build_dataloader
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.load import SampleDataset
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.training.trainer_inputs import TrainerInputs


class LossSums(NamedTuple):
    """Summed losses and unit counts of a micro-batch, one value per loss term."""

    losses: torch.Tensor  # (terms,), float64
    units: tuple[float, ...]


def build_evaluation_dataloader(inputs: TrainerInputs, samples: SampleDataset) -> RankDataLoader:
    """Build this rank's data loader for the evaluation samples, longest first; processes decode images and videos."""
    assert inputs.data.eval is not None  # transformers evaluates only if there is an evaluation dataset
    order = RowOrder(inputs.data.eval.lengths, seed=None)
    sampler = BatchSampler(order, inputs.plan.eval_batch, rank=inputs.ranks.rank)
    worker_count = inputs.args.dataloader_num_workers if inputs.data.vision else 0
    return build_dataloader(samples, sampler, inputs.collate, skips=inputs.data.skips, worker_count=worker_count)


@torch.no_grad()
def compute_evaluation_loss(
    inputs: TrainerInputs, samples: SampleDataset, sum_micro_batch: Callable[[MicroBatch], LossSums]
) -> float:
    """Return the mean loss per unit, summed over the loss terms (collective)."""
    sums = []
    for micro_batch in build_evaluation_dataloader(inputs, samples):
        inputs.data.skips.report(micro_batch)
        sums.append(sum_micro_batch(micro_batch))
        inputs.heartbeat.touch()
    losses = torch.stack([each.losses for each in sums]).sum(dim=0)
    units = torch.tensor([each.units for each in sums], dtype=losses.dtype).sum(dim=0)
    global_sums = torch.stack((losses, units.to(losses.device)))
    torch.distributed.all_reduce(global_sums)
    global_losses, global_units = global_sums[0], global_sums[1]
    return float((global_losses / global_units).sum())
