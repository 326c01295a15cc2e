"""Defines the order of items (rows or packs of rows) in each epoch, which is identical on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Item = int | tuple[int, ...]  # a row index, or the row indices of a pack


@dataclass(frozen=True)
class Epoch:
    """Ordered items of an epoch, the number of tokens in each item, and whether its rows exceed the length limit."""

    items: Sequence[Item]
    lengths: NDArray[np.int64]
    is_long: NDArray[np.bool_]


class ItemOrder(Protocol):
    """Interface for the order of items in each epoch; every epoch has the same number of items."""

    def __len__(self) -> int: ...

    def get_epoch(self, epoch_number: int) -> Epoch:
        """Return the items of an epoch; epochs are numbered from 0."""


class RowOrder:
    """Order of rows that are not packed; reshuffled in each epoch, or sorted by length if `seed` is None.

    length_limit: micro-batches should not contain rows on both sides of this number of tokens.
    """

    def __init__(self, lengths: NDArray[np.int64], *, seed: int | None, length_limit: int | None = None) -> None:
        self._lengths = lengths
        self._length_limit = length_limit
        self._seed = seed

    def __len__(self) -> int:
        return len(self._lengths)

    def get_epoch(self, epoch_number: int) -> Epoch:
        """Return the items of an epoch; epochs are numbered from 0."""
        order: NDArray[np.int64] = np.argsort(-self._lengths, kind="stable")
        if self._seed is not None:
            order = shuffle_indices(len(self), self._seed, epoch_number)
        return Epoch(order.tolist(), self._lengths[order], exceed_limit(self._lengths[order], self._length_limit))


def exceed_limit(lengths: NDArray[np.int64], limit: int | None) -> NDArray[np.bool_]:
    """Return which lengths exceed the limit; None is no limit."""
    return lengths > (np.inf if limit is None else limit)


def shuffle_indices(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of range(size) that depends only on seed and epoch."""
    return np.random.default_rng([seed, epoch]).permutation(size)
