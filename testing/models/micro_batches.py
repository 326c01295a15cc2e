"""Builds micro-batches of sequences whose tokens are all targets, for unit tests."""

from collections.abc import Sequence

import torch

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch


def build_micro_batch(*rows: Sequence[int] | torch.Tensor, layout: SequenceLayout | None = None) -> MicroBatch:
    """Return a micro-batch of one sequence per row of token ids; by default, the rows are padded and masked."""
    ids = [torch.as_tensor(row) for row in rows]
    return Collator(0, layout or SequenceLayout())([({"input_ids": row, "labels": row},) for row in ids])
