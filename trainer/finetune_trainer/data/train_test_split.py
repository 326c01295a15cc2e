"""Rows held out of training to evaluate on."""

import numpy as np

from finetune_trainer.data.token_dataset import TokenDataset
from finetune_trainer.errors import DatasetError

_STREAM = (0, 2)  # beside the job's seed, so that nothing else draws the same numbers


def hold_out(data: TokenDataset, ratio: float, *, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """What is left to train on, and the share held out: at least one row, each once.

    A row that was taken more than once stays on one side with all its copies.
    """
    origins, first, origin_of = np.unique(data.origins, return_index=True, return_inverse=True)
    if len(origins) < 2:
        raise DatasetError(
            "spec.dataset.splitDatasetRatio: a split needs at least two different rows, and spec.dataset.train has"
            f" {len(origins)}; add rows, or leave splitDatasetRatio out"
        )
    count = min(max(1, round(len(origins) * ratio)), len(origins) - 1)
    held = np.random.default_rng((seed, *_STREAM)).permutation(len(origins))[:count]
    return data.only(np.flatnonzero(~np.isin(origin_of, held))), data.only(np.sort(first[held]))
