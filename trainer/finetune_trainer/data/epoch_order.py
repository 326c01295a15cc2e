"""The order of an epoch's items, the same on all ranks: single rows, or packs of rows."""

import numpy as np

from finetune_trainer.data.epoch import Epoch, shuffle_indices
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.data_sources.arrays import IntArray


class RowOrder:
    """Orders single rows: reshuffled in each epoch, or longest first without a seed."""

    def __init__(self, lengths: IntArray, *, seed: int | None) -> None:
        self._lengths = lengths
        self._seed = seed

    def __len__(self) -> int:
        return len(self._lengths)

    def epoch(self, number: int) -> Epoch:
        """Return the items of the epoch; the first epoch has number 0."""
        order: IntArray = np.argsort(-self._lengths, kind="stable")
        if self._seed is not None:
            order = shuffle_indices(len(self), self._seed, number)
        return Epoch(order.tolist(), self._lengths[order])


Order = RowOrder | PackOrder
