"""What an epoch takes and in which order, the same for all ranks: rows one by one, or packs of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune_trainer.data.token_dataset import Numbers

Item = int | tuple[int, ...]  # a row, or the rows of a pack


@dataclass(frozen=True)
class Epoch:
    """The items in their order, and the tokens of each."""

    items: Sequence[Item]
    lengths: Numbers


class RowOrder:
    """Every row, shuffled anew in each epoch; without a seed the longest first."""

    def __init__(self, lengths: Numbers, *, seed: int | None) -> None:
        self._lengths = lengths
        self._seed = seed

    def __len__(self) -> int:
        return len(self._lengths)

    def epoch(self, number: int) -> Epoch:
        order: Numbers = np.argsort(-self._lengths, kind="stable")
        if self._seed is not None:
            order = _shuffle(len(self), self._seed, number)
        return Epoch(order.tolist(), self._lengths[order])


class PackOrder:
    """Every row once, in packs of at most `room` tokens, packed and shuffled anew in each epoch.

    How many packs there are, and how full, depends on the lengths alone and never changes: only rows of the same
    length swap places.
    """

    def __init__(self, lengths: Numbers, *, room: int, seed: int) -> None:
        self._lengths = lengths
        self._room = room
        self._seed = seed
        self._packs = len(self._pack(np.arange(len(lengths))))

    def __len__(self) -> int:
        return self._packs

    def epoch(self, number: int) -> Epoch:
        order = _shuffle(len(self._lengths), self._seed, number)
        packs = self._pack(order)
        shuffled = [packs[index] for index in _shuffle(len(packs), self._seed, number)]
        length = self._lengths.tolist()
        return Epoch(shuffled, np.array([sum(length[row] for row in pack) for pack in shuffled], dtype=np.int64))

    @property
    def fullness(self) -> float:
        """Share of the packs' room that rows fill."""
        return float(self._lengths.sum()) / (self._packs * self._room)

    def _pack(self, order: Numbers) -> list[tuple[int, ...]]:
        rows = order.tolist()
        packs = best_fit(self._lengths[order].tolist(), self._room)
        return [tuple(rows[position] for position in sorted(pack)) for pack in packs]


Order = RowOrder | PackOrder


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Best fit decreasing: the longest first, each into the pack where it leaves least room, or into a new one.

    A bit stands for every amount of room that some pack has left, so that the least that is enough is found at once.
    """
    packs: list[list[int]] = []
    with_room: list[list[list[int]]] = [[] for _ in range(room + 1)]
    some_have = 0
    for item in np.argsort(np.negative(lengths), kind="stable").tolist():
        length = lengths[item]
        enough = some_have >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            pack = with_room[left].pop()
            if not with_room[left]:
                some_have ^= 1 << left
        else:
            left, pack = room, []
            packs.append(pack)
        pack.append(item)
        with_room[left - length].append(pack)
        some_have |= 1 << (left - length)
    return packs


def _shuffle(size: int, seed: int, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.random.default_rng([seed, epoch]).permutation(size)
