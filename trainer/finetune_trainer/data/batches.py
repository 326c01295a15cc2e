"""Which samples make up which optimizer step: a matter of seed, epoch and effective batch, whatever the layout."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from finetune_api.batch import Batch
from finetune_trainer.data.tokens import FILLER, IGNORED, Features, TokenDataset

Collate = Callable[[Sequence[Any]], Features]


class BatchSampler(Sampler[list[int]]):
    """The micro-batches of one rank.

    Round r of the epoch covers the shuffled positions r x ranks x perDevice onwards, split among the ranks, so the
    rounds of one optimizer step cover the same samples in every layout. Fillers make the last round whole: they carry
    no loss, so that no sample counts twice and none is left out.
    """

    def __init__(self, size: int, batch: Batch, *, rank: int, seed: int | None) -> None:
        self._size = size
        self._batch = batch
        self._rank = rank
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        """Rounds per epoch, the same on every rank."""
        return -(-self._size // (self._batch.per_device * self._batch.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for round_number in range(len(self)):
            first = (round_number * self._batch.world_size + self._rank) * self._batch.per_device
            positions = range(first, first + self._batch.per_device)
            yield [int(order[position]) if position < self._size else FILLER for position in positions]

    def _order(self) -> Sequence[int]:
        if self._seed is None:
            return range(self._size)
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._size)  # type: ignore[return-value]


class Batches(DataLoader[tuple[Features, ...]]):
    """The loader of one rank. transformers sets the epoch here."""

    def set_epoch(self, epoch: int) -> None:
        assert isinstance(self.batch_sampler, BatchSampler)
        self.batch_sampler.set_epoch(epoch)


def load_batches(
    data: TokenDataset, batch: Batch, collate: Collate, *, rank: int, seed: int | None, workers: int
) -> Batches:
    """Shuffled by `seed`, or in order if there is none."""
    return Batches(
        data,
        batch_sampler=BatchSampler(len(data), batch, rank=rank, seed=seed),
        collate_fn=collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own: the loader must not draw from the generator that dropout uses
    )


class Collator:
    """Pads on the right to the longest sequence of the micro-batch: first sequences of all rows, then their second."""

    def __init__(self, pad_id: int) -> None:
        self._padding = {"input_ids": float(pad_id), "labels": float(IGNORED), "weights": 0.0}

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
