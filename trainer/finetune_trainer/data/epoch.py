"""The items of one epoch in their order, and the shuffle that orders them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune_trainer.data_sources.arrays import IntArray

Item = int | tuple[int, ...]  # the index of a row, or the row indices of a pack


@dataclass(frozen=True)
class Epoch:
    """The items of an epoch in order, and the number of tokens of each."""

    items: Sequence[Item]
    lengths: IntArray


def shuffle_indices(size: int, seed: int, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return a permutation of range(size) that depends on seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(size)
