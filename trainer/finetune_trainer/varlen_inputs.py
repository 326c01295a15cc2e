"""Arguments of the forward pass that describe several sequences of different lengths in one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

SEQUENCE_LENGTHS, KEY_POSITIONS = "sequence_lengths", "key_positions"


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Number of tokens of each sequence in a row, without the prefix that it shares with an earlier sequence.

    torch.compile would compile a layer again for each new number of sequences if this were a tuple (decisions/533).
    """

    values: tuple[int, ...]
    prefixes: tuple[range, ...] | None = None  # positions of each sequence's shared prefix; None: there are none


def split_by_position_ids(position_ids: torch.Tensor) -> list[int]:
    """Return the number of tokens of each sequence in a row; its position ids, (tokens,), restart at 0."""
    starts = (position_ids == 0).nonzero()[:, 0].tolist()
    return [end - start for start, end in pairwise((*starts, len(position_ids)))]


def build_varlen_inputs(lengths: Sequence[int], prefixes: Sequence[range] | None = None) -> dict[str, Any]:
    """Return the arguments that models pass on to their attention function.

    The names are those of transformers' FlashAttentionKwargs, except for the lengths themselves, which attention can
    read without waiting for the GPU, and the positions of the keys, which are absent without prefixes.

    lengths: number of tokens of each sequence, without its prefix. prefixes: positions of the tokens that precede each
    sequence, as part of an earlier one (decisions/534).
    """
    boundaries, longest = _build_boundaries(lengths), max(lengths)
    inputs = {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
        SEQUENCE_LENGTHS: SequenceLengths(tuple(lengths), tuple(prefixes) if prefixes else None),
    }
    if not prefixes:
        return inputs
    key_lengths = [len(prefix) + length for prefix, length in zip(prefixes, lengths, strict=True)]
    starts = accumulate(lengths[:-1], initial=0)
    own = (range(start, start + length) for start, length in zip(starts, lengths, strict=True))
    positions = chain.from_iterable(chain(*pair) for pair in zip(prefixes, own, strict=True))
    return {
        **inputs,
        "cu_seq_lens_k": _build_boundaries(key_lengths),
        "max_length_k": max(key_lengths),
        KEY_POSITIONS: torch.tensor(list(positions)),
    }


def _build_boundaries(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
