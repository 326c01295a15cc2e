"""Splits a dataset into training and evaluation rows."""

import numpy as np

from finetune_trainer.data.token_dataset import TokenDataset
from finetune_trainer.errors import DatasetError

_SEED_KEY = (0, 2)  # appended to the seed of the job, so that the split is independent of other random draws


def hold_out_rows(data: TokenDataset, ratio: float, *, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """Split the data into training rows and at least one held-out row.

    All copies of a row are on the same side of the split. The held-out rows contain no duplicates.
    """
    origin_ids, first_copy, origin_of_row = np.unique(data.origin_ids, return_index=True, return_inverse=True)
    if len(origin_ids) < 2:
        raise DatasetError(
            "spec.dataset.splitDatasetRatio: a split needs at least two different rows, and spec.dataset.train has"
            f" {len(origin_ids)}; add rows, or leave splitDatasetRatio out"
        )
    count = min(max(1, round(len(origin_ids) * ratio)), len(origin_ids) - 1)
    held_out = np.random.default_rng((seed, *_SEED_KEY)).permutation(len(origin_ids))[:count]
    train_rows = np.flatnonzero(~np.isin(origin_of_row, held_out))
    return data.select(train_rows), data.select(np.sort(first_copy[held_out]))
