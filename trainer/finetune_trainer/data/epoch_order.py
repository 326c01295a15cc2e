"""Defines the order of items in each epoch, which is identical on all ranks. An item is a row or a pack of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Item = int | tuple[int, ...]  # a row index, or the row indices of a pack


@dataclass(frozen=True)
class Epoch:
    """Ordered items of an epoch, and the number of tokens of each item."""

    items: Sequence[Item]
    lengths: NDArray[np.int64]


class ItemOrder(Protocol):
    """Interface for the order of items in each epoch; every epoch has the same number of items."""

    def __len__(self) -> int: ...

    def get_epoch(self, number: int) -> Epoch:
        """Return the items of an epoch; the first epoch is number 0."""


class RowOrder:
    """Order of single rows: reshuffled in each epoch, or longest first if `seed` is None."""

    def __init__(self, lengths: NDArray[np.int64], *, seed: int | None) -> None:
        self._lengths = lengths
        self._seed = seed

    def __len__(self) -> int:
        return len(self._lengths)

    def get_epoch(self, number: int) -> Epoch:
        """Return the items of an epoch; the first epoch is number 0."""
        order: NDArray[np.int64] = np.argsort(-self._lengths, kind="stable")
        if self._seed is not None:
            order = shuffle_indices(len(self), self._seed, number)
        return Epoch(order.tolist(), self._lengths[order])


def shuffle_indices(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of range(size) that depends only on seed and epoch."""
    return np.random.default_rng([seed, epoch]).permutation(size)
