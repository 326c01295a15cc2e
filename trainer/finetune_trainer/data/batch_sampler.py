"""Which samples make up which optimizer step: a matter of seed, epoch and effective batch, whatever the layout."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from finetune_api.batch import Batch
from finetune_trainer.data.epoch_order import Epoch, Item, Order
from finetune_trainer.data.packing import AXES, POSITIONS
from finetune_trainer.data.token_dataset import FILLER, IGNORED, Features

Collate = Callable[[Sequence[Any]], Features]


class BatchSampler(Sampler[list[Item]]):
    """The micro-batches of one rank.

    A step takes the next `effective` items of the epoch in every layout. Inside the step they are dealt out by length,
    so that those of one micro-batch need little padding and the ranks have similar work in each round; every other
    round is dealt backwards, lest one rank always gets the longest. Fillers make the last round whole: they carry no
    loss, so that no sample counts twice and none is left out.
    """

    def __init__(self, order: Order, batch: Batch, *, rank: int) -> None:
        self._order = order
        self._batch = batch
        self._rank = rank
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        """Rounds per epoch, the same on every rank."""
        return -(-len(self._order) // self._round)

    def __iter__(self) -> Iterator[list[Item]]:
        epoch = self._order.epoch(self._epoch)
        for first in range(0, len(self._order), self._batch.effective):
            yield from self._deal(epoch, range(first, min(first + self._batch.effective, len(self._order))))

    @property
    def _round(self) -> int:
        return self._batch.per_device * self._batch.world_size

    def _deal(self, epoch: Epoch, step: range) -> Iterator[list[Item]]:
        sorted_by_length = np.argsort(-epoch.lengths[step.start : step.stop], kind="stable")
        items = [epoch.items[step.start + int(position)] for position in sorted_by_length]
        items += [FILLER] * (-len(items) % self._round)
        for number, first in enumerate(range(0, len(items), self._round)):
            turn = self._rank if number % 2 == 0 else self._batch.world_size - 1 - self._rank
            start = first + turn * self._batch.per_device
            yield items[start : start + self._batch.per_device]


class Batches(DataLoader[tuple[Features, ...]]):
    """The loader of one rank. transformers sets the epoch here."""

    def set_epoch(self, epoch: int) -> None:
        assert isinstance(self.batch_sampler, BatchSampler)
        self.batch_sampler.set_epoch(epoch)


def load_batches(
    data: Dataset[tuple[Features, ...]], sampler: BatchSampler, collate: Collate, *, workers: int
) -> Batches:
    return Batches(
        data,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own: the loader must not draw from the generator that dropout uses
    )


def padding_share(order: Order, batch: Batch) -> float:
    """Share of the tokens computed in the first epoch that are padding."""
    lengths, computed = order.epoch(0).lengths, 0
    for first in range(0, len(lengths), batch.effective):
        longest_first = np.sort(lengths[first : first + batch.effective])[::-1]
        computed += int(longest_first[:: batch.per_device].sum()) * batch.per_device
    return 1 - float(lengths.sum()) / computed


class Collator:
    """Pads on the right to the longest sequence of the micro-batch: first sequences of all rows, then their second.

    In a batch of packs every token of padding is at position 0, a row of its own.
    """

    def __init__(self, pad_id: int) -> None:
        zeros = dict.fromkeys(("weights", POSITIONS, AXES), 0.0)
        self._padding = {"input_ids": float(pad_id), "labels": float(IGNORED), **zeros}

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> Features:
        """(rows x sequences, longest) of each feature, and the attention mask."""
        sequences = [row[number] for number in range(len(rows[0])) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        batch = {
            name: pad([sequence[name] for sequence in sequences], batch_first=True, padding_value=self._padding[name])
            for name in sequences[0]
        }
        ones = [torch.ones_like(sequence["input_ids"]) for sequence in sequences]
        return {**batch, "attention_mask": pad(ones, batch_first=True, padding_value=0)}
