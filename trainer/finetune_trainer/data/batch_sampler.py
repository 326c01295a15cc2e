"""Assigns samples to optimizer steps by seed, epoch and effective batch alone, and inside a step to the ranks.

The reasons are in decisions/501.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from finetune_api.batch import Batch
from finetune_trainer.data.collator import Collate
from finetune_trainer.data.epoch_order import Epoch, Item, Order
from finetune_trainer.data.token_dataset import FILLER, Features


class BatchSampler(Sampler[list[Item]]):
    """Yields the micro-batches of one rank.

    A step consumes the next `effective` items of the epoch, whatever the layout of ranks and micro-batches. Within a
    step, items are sorted by length and distributed in rounds of one micro-batch per rank, so that a micro-batch needs
    little padding and ranks have similar work. Every other round is distributed in reverse, or one rank would always
    get the longest items. Fillers complete the last round: they have no target tokens, so no sample counts twice and
    none is dropped.
    """

    def __init__(self, order: Order, batch: Batch, *, rank: int) -> None:
        self._order = order
        self._batch = batch
        self._rank = rank
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch whose items the next iteration yields."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of micro-batches per epoch, the same on every rank."""
        return -(-len(self._order) // self._items_per_round)

    def __iter__(self) -> Iterator[list[Item]]:
        epoch = self._order.epoch(self._epoch)
        for first in range(0, len(self._order), self._batch.effective):
            yield from self._distribute(epoch, range(first, min(first + self._batch.effective, len(self._order))))

    @property
    def _items_per_round(self) -> int:
        return self._batch.per_device * self._batch.world_size

    def _distribute(self, epoch: Epoch, step: range) -> Iterator[list[Item]]:
        """Yield this rank's micro-batches of one step, given by the positions of its items in the epoch."""
        # decisions/503
        sorted_by_length = np.argsort(-epoch.lengths[step.start : step.stop], kind="stable")
        items = [epoch.items[step.start + int(position)] for position in sorted_by_length]
        items += [FILLER] * (-len(items) % self._items_per_round)
        for round_number, first in enumerate(range(0, len(items), self._items_per_round)):
            turn = self._rank if round_number % 2 == 0 else self._batch.world_size - 1 - self._rank
            start = first + turn * self._batch.per_device
            yield items[start : start + self._batch.per_device]


class RankDataLoader(DataLoader[tuple[Features, ...]]):
    """The data loader of one rank, with the `set_epoch` that transformers calls."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler."""
        assert isinstance(self.batch_sampler, BatchSampler)
        self.batch_sampler.set_epoch(epoch)


def build_dataloader(
    dataset: Dataset[tuple[Features, ...]], sampler: BatchSampler, collate: Collate, *, workers: int
) -> RankDataLoader:
    """Build the data loader of one rank with `workers` loader processes; 0 loads in the training process."""
    return RankDataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # a separate one: the loader must not advance the generator that dropout uses
    )


def compute_padding_share(order: Order, batch: Batch) -> float:
    """Return the share of padding, from 0 to 1, among all tokens computed in the first epoch."""
    lengths, computed = order.epoch(0).lengths, 0
    for first in range(0, len(lengths), batch.effective):
        longest_first = np.sort(lengths[first : first + batch.effective])[::-1]
        computed += int(longest_first[:: batch.per_device].sum()) * batch.per_device
    return 1 - float(lengths.sum()) / computed
