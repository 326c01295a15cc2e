"""Turns samples into the padded tensors of one micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from finetune_trainer.data.packing import MROPE_POSITION_IDS, POSITION_IDS
from finetune_trainer.data.token_dataset import IGNORE_INDEX, Features

Collate = Callable[[Sequence[Any]], Features]


class Collator:
    """Pads sequences on the right to the longest one of the micro-batch.

    With preference pairs all chosen sequences come first, then all rejected ones. In a batch of packs every padding
    token has position id 0, which makes it a row of its own.
    """

    def __init__(self, pad_id: int) -> None:
        zeros = dict.fromkeys(("weights", POSITION_IDS, MROPE_POSITION_IDS), 0.0)
        self._padding_values = {"input_ids": float(pad_id), "labels": float(IGNORE_INDEX), **zeros}

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> Features:
        """Return every feature as (rows x sequences per row, longest sequence, ...), and the attention mask."""
        sequences = [row[index] for index in range(len(rows[0])) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        batch = {
            name: pad([each[name] for each in sequences], batch_first=True, padding_value=self._padding_values[name])
            for name in sequences[0]
        }
        ones = [torch.ones_like(sequence["input_ids"]) for sequence in sequences]
        return {**batch, "attention_mask": pad(ones, batch_first=True, padding_value=0)}
