"""Arguments of the forward pass that describe several sequences of different lengths in one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

SEQUENCE_LENGTHS = "sequence_lengths"


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Number of tokens of each sequence in a row.

    torch.compile would compile a layer again for each new number of sequences if this were a tuple (decisions/533).
    """

    values: tuple[int, ...]


def split_by_position_ids(position_ids: torch.Tensor) -> list[int]:
    """Return the number of tokens of each sequence in a row; its position ids, (tokens,), restart at 0."""
    starts = (position_ids == 0).nonzero()[:, 0].tolist()
    return [end - start for start, end in pairwise((*starts, len(position_ids)))]


def build_varlen_inputs(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the arguments that models pass on to their attention function.

    The names are those of transformers' FlashAttentionKwargs, except for the lengths themselves, which attention can
    read without waiting for the GPU. lengths: number of tokens of each sequence.
    """
    boundaries, longest = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths)
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
        SEQUENCE_LENGTHS: SequenceLengths(tuple(lengths)),
    }
