"""Packs several rows into one sequence; transformers isolates rows whose position ids restart at 0 (decisions/604)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from finetune_trainer.data.epoch_order import Epoch, Item, exceed_limit, shuffle_indices
from finetune_trainer.data.token_dataset import MROPE_POSITION_IDS, POSITION_IDS, Features

MropeFunction = Callable[[Features], torch.Tensor]  # computes the position ids of a row, (seq, 3)


class PackedDataset(Dataset[tuple[Features, ...]]):
    """Concatenates the rows of a pack and adds position ids; a pack is a tuple of row indices.

    The first token of a row is never a target, so no row predicts the beginning of the next one. Pixel inputs keep
    the order of the rows.
    """

    def __init__(self, rows: Dataset[tuple[Features, ...]], compute_mrope_ids: MropeFunction | None = None) -> None:
        self._rows = rows
        self._compute_mrope_ids = compute_mrope_ids

    def __getitem__(self, pack: Item) -> tuple[Features, ...]:
        members = [
            add_position_ids(self._rows[row][0], self._compute_mrope_ids)
            for row in ([pack] if isinstance(pack, int) else pack)
        ]
        names = dict.fromkeys(name for member in members for name in member)
        return ({name: torch.cat([member[name] for member in members if name in member]) for name in names},)


def add_position_ids(sequence: Features, compute_mrope_ids: MropeFunction | None) -> Features:
    """Add the position ids of a sequence, unless it has them already."""
    if POSITION_IDS in sequence:
        return sequence
    position_ids = {POSITION_IDS: torch.arange(len(sequence["input_ids"]))}
    if compute_mrope_ids:
        position_ids[MROPE_POSITION_IDS] = compute_mrope_ids(sequence)
    return {**sequence, **position_ids}


class PackOrder:
    """Order of packs of at most `max_length` tokens; rows are shuffled and packed again in each epoch.

    The number of packs and their lengths depend only on the row lengths and are the same in every epoch, because
    shuffling swaps only rows of equal length (decisions/504). length_limit: no pack contains rows on both sides of this
    number of tokens.
    """

    def __init__(
        self, lengths: NDArray[np.int64], *, max_length: int, seed: int, length_limit: int | None = None
    ) -> None:
        self._lengths = lengths
        self._is_long = exceed_limit(lengths, length_limit)
        self._max_length = max_length
        self._seed = seed
        self._pack_count = len(self._pack_rows(np.arange(len(lengths))))

    def __len__(self) -> int:
        return self._pack_count

    def get_epoch(self, epoch_number: int) -> Epoch:
        """Return the packs of an epoch; epochs are numbered from 0."""
        order = shuffle_indices(len(self._lengths), self._seed, epoch_number)
        packs = self._pack_rows(order)
        shuffled = [packs[index] for index in shuffle_indices(len(packs), self._seed, epoch_number)]
        lengths = self._lengths.tolist()
        pack_lengths = np.array([sum(lengths[row] for row in pack) for pack in shuffled], dtype=np.int64)
        return Epoch(shuffled, pack_lengths, self._is_long[[pack[0] for pack in shuffled]])

    @property
    def utilization(self) -> float:
        """Fraction of the total pack capacity that contains tokens, from 0 to 1."""
        return float(self._lengths.sum()) / (self._pack_count * self._max_length)

    def _pack_rows(self, order: NDArray[np.int64]) -> list[tuple[int, ...]]:
        packs: list[tuple[int, ...]] = []
        for side in (order[self._is_long[order]], order[~self._is_long[order]]):
            rows = side.tolist()
            packs += (
                tuple(rows[position] for position in sorted(pack))
                for pack in pack_best_fit(self._lengths[side].tolist(), self._max_length)
            )
        return packs


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack rows with the best-fit-decreasing algorithm and return the row indices of each pack.

    Each row, longest first, is added to the fullest pack with enough space, or to a new pack. Bit n of `free_sizes` is
    set if some pack has n free tokens, so that bit operations find the smallest sufficient size without a search.
    """
    packs: list[list[int]] = []
    packs_by_free_size: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    free_sizes = 0
    for index in np.argsort(np.negative(lengths), kind="stable").tolist():
        length = lengths[index]
        sufficient = free_sizes >> length
        if sufficient:
            free = length + (sufficient & -sufficient).bit_length() - 1
            pack = packs_by_free_size[free].pop()
            if not packs_by_free_size[free]:
                free_sizes ^= 1 << free
        else:
            free, pack = capacity, []
            packs.append(pack)
        pack.append(index)
        packs_by_free_size[free - length].append(pack)
        free_sizes |= 1 << (free - length)
    return packs
