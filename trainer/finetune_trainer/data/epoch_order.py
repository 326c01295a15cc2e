"""The items of each epoch in their order, the same on all ranks; single rows, or the packs of `packing`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Item = int | tuple[int, ...]  # the index of a row, or the row indices of a pack


@dataclass(frozen=True)
class Epoch:
    """The items of an epoch in order, and the number of tokens of each."""

    items: Sequence[Item]
    lengths: NDArray[np.int64]


class Order(Protocol):
    """Orders the same number of items in every epoch."""

    def __len__(self) -> int: ...

    def epoch(self, number: int) -> Epoch:
        """Return the items of the epoch; the first epoch has number 0."""


class RowOrder:
    """Orders single rows: reshuffled in each epoch, or longest first without a seed."""

    def __init__(self, lengths: NDArray[np.int64], *, seed: int | None) -> None:
        self._lengths = lengths
        self._seed = seed

    def __len__(self) -> int:
        return len(self._lengths)

    def epoch(self, number: int) -> Epoch:
        """Return the items of the epoch; the first epoch has number 0."""
        order: NDArray[np.int64] = np.argsort(-self._lengths, kind="stable")
        if self._seed is not None:
            order = shuffle_indices(len(self), self._seed, number)
        return Epoch(order.tolist(), self._lengths[order])


def shuffle_indices(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of range(size) that depends on seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(size)
