"""Assigns samples to optimizer steps, and the samples of a step to ranks.

The samples of a step depend only on seed, epoch and effective batch (decisions/501).
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from finetune_api.batch import Batch
from finetune_trainer.data.collator import Collate
from finetune_trainer.data.epoch_order import Epoch, Item, ItemOrder
from finetune_trainer.data.late_skips import LateSkips, collate_with_skips
from finetune_trainer.data.token_dataset import FILLER, Features
from finetune_trainer.data.worker_errors import send_errors


class BatchSampler(Sampler[list[Item]]):
    """Yields the micro-batches of one rank.

    Each step consumes the next `batch.effective` items of the epoch, regardless of the number of ranks. Within a step,
    items are sorted by length and distributed in rounds of one micro-batch per rank, so that a micro-batch needs
    little padding and ranks have similar work. Every second round is distributed in reverse order; otherwise one rank
    would always get the longest items. A rank without items in the last round gets a filler without target tokens, so
    that no sample counts twice and none is dropped. Items above and below the length limit of the order are in separate
    micro-batches, except in a step that would then need more rounds.
    """

    def __init__(self, order: ItemOrder, batch: Batch, *, rank: int) -> None:
        self._order = order
        self._batch = batch
        self._rank = rank
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next iteration over the sampler."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of micro-batches per epoch, which is the same on every rank."""
        return -(-len(self._order) // self._items_per_round)

    def __iter__(self) -> Iterator[list[Item]]:
        epoch = self._order.get_epoch(self._epoch)
        for first in range(0, len(self._order), self._batch.effective):
            yield from self._distribute_step(epoch, range(first, min(first + self._batch.effective, len(self._order))))

    @property
    def _items_per_round(self) -> int:
        return self._batch.micro_batch_size * self._batch.world_size

    def _distribute_step(self, epoch: Epoch, positions: range) -> Iterator[list[Item]]:
        """Yield the micro-batches of this rank for one step.

        positions: range of indices of the items of the step in the epoch.
        """
        # Sort by length only within a step (decisions/503).
        step = slice(positions.start, positions.stop)
        lengths, is_long = epoch.lengths[step], epoch.is_long[step]
        sorted_by_length = np.lexsort((-lengths, ~is_long))
        items = [epoch.items[positions.start + int(offset)] for offset in sorted_by_length]
        long_count = int(is_long.sum())
        empty_places, _ = _separate_long_items(long_count, len(items), self._batch)
        items[long_count:long_count] = [FILLER] * empty_places
        items += [FILLER] * (-len(items) % self._items_per_round)
        for round_number, first in enumerate(range(0, len(items), self._items_per_round)):
            turn = self._rank if round_number % 2 == 0 else self._batch.world_size - 1 - self._rank
            start = first + turn * self._batch.micro_batch_size
            micro_batch = items[start : start + self._batch.micro_batch_size]
            yield [item for item in micro_batch if item != FILLER] or [FILLER]


def _separate_long_items(long_count: int, count: int, batch: Batch) -> tuple[int, int]:
    """Return how many places after the long items of a step stay empty, and how many other items fill them instead.

    Empty places must not increase the number of rounds, which is the same in all steps.
    """
    places, items_per_round = -long_count % batch.micro_batch_size, batch.micro_batch_size * batch.world_size
    return (places, 0) if places <= -count % items_per_round else (0, min(places, count - long_count))


def count_mixed_items(order: ItemOrder, batch: Batch) -> int:
    """Return how many items of the first epoch share a micro-batch with items above the length limit of the order."""
    is_long = order.get_epoch(0).is_long
    steps = (is_long[first : first + batch.effective] for first in range(0, len(is_long), batch.effective))
    return sum(_separate_long_items(int(step.sum()), len(step), batch)[1] for step in steps)


class RankDataLoader(DataLoader[tuple[Features, ...]]):
    """Data loader of one rank, with the `set_epoch` method that transformers calls."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler."""
        assert isinstance(self.batch_sampler, BatchSampler)
        self.batch_sampler.set_epoch(epoch)


def build_dataloader(
    dataset: Dataset[tuple[Features, ...]],
    sampler: BatchSampler,
    collate: Collate,
    *,
    skips: LateSkips,
    worker_count: int,
    is_persistent: bool = False,
) -> RankDataLoader:
    """Build the data loader for one rank.

    skips: the caller reports the micro-batches to it. worker_count: number of loader processes; if it is 0, the
    training process loads the samples. is_persistent: whether the processes are used again in the next epoch.
    """
    return RankDataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=partial(collate_with_skips, collate=collate, skips=skips),
        worker_init_fn=send_errors,
        num_workers=worker_count,
        persistent_workers=is_persistent and worker_count > 0,
        pin_memory=torch.cuda.is_available(),
        # Use a separate generator, because the data loader must not change the random state that dropout uses.
        generator=torch.Generator(),
    )


def compute_padding_share(order: ItemOrder, batch: Batch, pad_multiple: int = 1) -> float:
    """Return the fraction of tokens in the first epoch that are padding, from 0 to 1.

    pad_multiple: the length of padded rows is a multiple of this.
    """
    lengths, size, computed = order.get_epoch(0).lengths, batch.micro_batch_size, 0
    for first in range(0, len(lengths), batch.effective):
        longest_first = np.sort(lengths[first : first + batch.effective])[::-1]
        row_lengths = -(-longest_first[::size] // pad_multiple) * pad_multiple
        row_counts = [min(size, len(longest_first) - start) for start in range(0, len(longest_first), size)]
        computed += int(row_lengths @ row_counts)
    return 1 - float(lengths.sum()) / computed
