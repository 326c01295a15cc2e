"""Collates samples into a micro-batch: one row without padding, or padded rows; with pixel inputs of images and videos.

The layout depends on the attention implementation (decisions/527).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch.nn.functional import pad

from finetune_trainer.data.micro_batch import MicroBatch, TargetTokens
from finetune_trainer.data.packing import MropeFunction, add_position_ids
from finetune_trainer.data.shared_prompts import count_shared_tokens
from finetune_trainer.data.token_dataset import (
    IGNORE_INDEX,
    MROPE_POSITION_IDS,
    POSITION_IDS,
    REFERENCE_LOGPS,
    TOKEN_FEATURES,
    Features,
)
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.varlen_inputs import build_varlen_inputs, split_by_position_ids
from finetune_trainer.vision.processor import VisionProcessor

Collate = Callable[[Sequence[Any]], MicroBatch]

_JOINED_FEATURES = ("input_ids", "labels", "weights", POSITION_IDS, MROPE_POSITION_IDS)
_PIXEL_INPUTS = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}


@dataclass(frozen=True)
class SequenceLayout:
    """Arrangement of the sequences of a micro-batch in the input tensors."""

    padding_free: bool = False  # True: all sequences in one row; False: one padded row per sequence or pack
    shares_prompts: bool = False  # in one row, preference pairs contain the tokens of their prompt once
    pad_multiple: int = 1  # the length of padded rows is a multiple of this
    masks_padding: bool = True  # whether padded rows have an attention mask


@dataclass(frozen=True)
class _Placement:
    """The sequences in the order of the input tensors."""

    sequences: Sequence[Features]
    numbers: Sequence[int]  # of each sequence: chosen ones before rejected ones
    skipped: Sequence[int]  # tokens at the start of each sequence that the sequence before it contains


class Collator:
    """Arranges the sequences of a micro-batch, finds their target tokens, and concatenates their pixel inputs.

    In a batch of preference pairs, all chosen sequences precede all rejected ones, except in the input tensors if pairs
    share prompts.
    """

    def __init__(
        self,
        pad_id: int,
        layout: SequenceLayout,
        compute_mrope_ids: MropeFunction | None = None,
        visual_token_ids: Collection[int] = (),
    ) -> None:
        self._pad_id = pad_id
        self._layout = layout
        self._compute_mrope_ids = compute_mrope_ids
        self._visual_token_ids = visual_token_ids

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> MicroBatch:
        """Return the micro-batch. Its input ids are (1, tokens), or (rows x sequences per row, longest sequence)."""
        placement = self._place(rows)
        sequences = placement.sequences
        packs = [_split_pack(sequence, skipped) for sequence, skipped in zip(sequences, placement.skipped, strict=True)]
        if self._layout.padding_free:
            starts = list(accumulate((sum(pack) for pack in packs[:-1]), initial=0))
            inputs = _build_row(placement, self._compute_mrope_ids)
            prefixes = _find_prefixes(placement, starts)
            inputs |= build_varlen_inputs(tuple(chain.from_iterable(packs)), prefixes)
        else:
            inputs = _build_padded_rows(sequences, self._pad_id, self._layout)
            starts = [index * inputs["input_ids"].shape[1] for index in range(len(sequences))]
        is_in_order = not any(placement.skipped)
        numbers = range(sum(map(len, packs))) if is_in_order else placement.numbers
        targets = _find_targets(placement, packs, starts, torch.tensor(numbers))
        by_number = _flatten(rows)
        lengths = tuple(chain.from_iterable(map(_split_pack, by_number)))
        has_reference = REFERENCE_LOGPS in by_number[0]
        return MicroBatch(
            {**inputs, **_join_pixel_inputs(placement)},
            targets,
            lengths,
            target_counts=tuple(torch.bincount(targets.sequences, minlength=len(lengths)).tolist()),
            shared_lengths=tuple(filter(None, placement.skipped)),
            reference_logps=torch.cat([row[REFERENCE_LOGPS] for row in by_number]) if has_reference else None,
            pack_mask=_build_pack_mask(sequences, inputs["input_ids"].shape),
        )

    def use_layout(self, layout: SequenceLayout) -> None:
        """Arrange later micro-batches by another layout."""
        self._layout = layout

    def _place(self, rows: Sequence[tuple[Features, ...]]) -> _Placement:
        """Choose the order of the sequences, and the tokens that they share."""
        if self._layout.shares_prompts and (shared := count_shared_tokens(rows, self._visual_token_ids)):
            numbers = [row + offset for row in range(len(rows)) for offset in (0, len(rows))]
            skipped = [count for tokens in shared for count in (0, tokens)]
            return _Placement([sequence for row in rows for sequence in row], numbers, skipped)
        sequences = _flatten(rows)
        return _Placement(sequences, range(len(sequences)), [0] * len(sequences))


class MultimodalCollator:
    """Collates the rows of a vision-language model.

    If a batch lacks a modality that every rank must process, a dummy image or video is appended to its shortest
    sequence. Causal attention hides the dummy from the other tokens, and it has no targets. Thus every rank runs the
    vision tower equally often in every step, as the collectives for trained or sharded weights require, and at the
    same positions of the autograd graph as with real media.
    """

    def __init__(
        self,
        pad_id: int,
        layout: SequenceLayout,
        vision: VisionProcessor,
        *,
        required_modalities: Collection[Modality],
    ) -> None:
        compute_mrope_ids = vision.compute_mrope_position_ids if vision.family.uses_mrope else None
        self._collate = Collator(pad_id, layout, compute_mrope_ids, vision.visual_token_ids)
        self._vision = vision
        self._dummies = {
            _PIXEL_INPUTS[modality]: vision.build_dummy(modality) for modality in sorted(required_modalities)
        }
        self.use_layout = self._collate.use_layout

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> MicroBatch:
        """Return the micro-batch, with the pixel inputs and, if the model uses them, token type ids."""
        for pixels, dummy in self._dummies.items():
            if not any(pixels in sequence for row in rows for sequence in row):
                rows = _add_dummy(rows, dummy, self._vision)
        batch = self._collate(rows)
        return replace(batch, inputs={**batch.inputs, **self._vision.token_type_ids(batch.inputs["input_ids"])})


def _split_pack(sequence: Features, skipped: int = 0) -> list[int]:
    """Return the number of tokens of each row of a pack, or of the sequence if it is no pack, without skipped ones."""
    if POSITION_IDS not in sequence or skipped:
        return [len(sequence["input_ids"]) - skipped]
    return split_by_position_ids(sequence[POSITION_IDS])


def _flatten(rows: Sequence[tuple[Features, ...]]) -> list[Features]:
    """Return the first sequence of each row, then the second one of each row."""
    return [row[index] for index in range(len(rows[0])) for row in rows]


def _find_prefixes(placement: _Placement, starts: Sequence[int]) -> list[range] | None:
    """Return the positions of the tokens that each sequence shares with the one before it; None without such tokens."""
    if not any(placement.skipped):
        return None
    previous_starts = (0, *starts[:-1])
    return [range(start, start + count) for start, count in zip(previous_starts, placement.skipped, strict=True)]


def _join_pixel_inputs(placement: _Placement) -> Features:
    """Concatenate the pixel inputs in the order of the sequences; those of shared prompts are included once."""
    included: dict[str, list[torch.Tensor]] = {}
    previous: Features = {}
    for sequence, skipped in zip(placement.sequences, placement.skipped, strict=True):
        for name, value in sequence.items():
            if name not in TOKEN_FEATURES and not (skipped and name in previous):
                included.setdefault(name, []).append(value)
        previous = sequence
    return {name: torch.cat(values) for name, values in included.items()}


def _build_row(placement: _Placement, compute_mrope_ids: MropeFunction | None) -> dict[str, torch.Tensor]:
    """Return all sequences in one row without padding; input ids: (1, tokens)."""
    located = [add_position_ids(sequence, compute_mrope_ids) for sequence in placement.sequences]

    def join(name: str) -> torch.Tensor:
        parts = [sequence[name][skipped:] for sequence, skipped in zip(located, placement.skipped, strict=True)]
        return torch.cat(parts).unsqueeze(0)

    positions = join(POSITION_IDS)
    if MROPE_POSITION_IDS in located[0]:
        positions = _stack_position_ids(positions, join(MROPE_POSITION_IDS))
    return {"input_ids": join("input_ids"), POSITION_IDS: positions}


def _build_padded_rows(sequences: Sequence[Features], pad_id: int, layout: SequenceLayout) -> dict[str, torch.Tensor]:
    """Return the sequences padded on the right to equal length; input ids: (sequences, longest sequence).

    Padding on the right is hidden by causal attention. Padding tokens in packs have position id 0, so that attention
    treats each as a separate row. Packs have no attention mask, because transformers isolates rows by position ids only
    if there is neither a mask nor a cache.
    """
    longest = max(len(sequence["input_ids"]) for sequence in sequences)
    padded_length = -(-longest // layout.pad_multiple) * layout.pad_multiple

    def pad_rows(rows: Sequence[torch.Tensor], value: int = 0) -> torch.Tensor:
        sides = (0, 0) * (rows[0].dim() - 1)  # pad the first dimension only
        return torch.stack([pad(row, (*sides, 0, padded_length - len(row)), value=value) for row in rows])

    inputs = {"input_ids": pad_rows([sequence["input_ids"] for sequence in sequences], pad_id)}
    if POSITION_IDS in sequences[0]:
        positions = pad_rows([sequence[POSITION_IDS] for sequence in sequences])
        if MROPE_POSITION_IDS in sequences[0]:
            mrope_ids = pad_rows([sequence[MROPE_POSITION_IDS] for sequence in sequences])
            positions = _stack_position_ids(positions, mrope_ids)
        return {**inputs, POSITION_IDS: positions}
    if layout.masks_padding:
        inputs["attention_mask"] = pad_rows([torch.ones_like(sequence["input_ids"]) for sequence in sequences])
    return inputs


def _build_pack_mask(sequences: Sequence[Features], shape: torch.Size) -> torch.Tensor | None:
    """Return which tokens of padded packs are no padding, (sequences, seq), as 1 and 0; None without padded packs.

    shape: shape of the input ids.
    """
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    if POSITION_IDS not in sequences[0] or sum(lengths) == shape.numel():
        return None
    return (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()


def _stack_position_ids(positions: torch.Tensor, mrope_ids: torch.Tensor) -> torch.Tensor:
    """Return the position ids for models with M-RoPE, (4, batch, seq): text positions, then time, height and width."""
    return torch.cat((positions.unsqueeze(0), mrope_ids.permute(2, 0, 1)))


def _find_targets(
    placement: _Placement, packs: Sequence[Sequence[int]], starts: Sequence[int], numbers: torch.Tensor
) -> TargetTokens:
    """Return the target tokens; the first token of a row is never one.

    packs: number of tokens of each row of a pack, by sequence. starts: index of the first token of each sequence or
    pack in the flattened input ids. numbers: of each sequence or row of a pack.
    """
    sequences = placement.sequences
    indices = [(sequence["labels"][1:] != IGNORE_INDEX).nonzero()[:, 0] for sequence in sequences]
    offsets = (start - skipped for start, skipped in zip(starts, placement.skipped, strict=True))
    positions = torch.cat([index + offset for index, offset in zip(indices, offsets, strict=True)])
    row_starts = [
        start + offset for start, pack in zip(starts, packs, strict=True) for offset in accumulate(pack[:-1], initial=0)
    ]

    def select(name: str) -> torch.Tensor:
        return torch.cat([row[name][1:][index] for row, index in zip(sequences, indices, strict=True)])

    return TargetTokens(
        positions,
        select("labels"),
        numbers[torch.searchsorted(torch.tensor(row_starts), positions, right=True) - 1],
        select("weights") if "weights" in sequences[0] else None,
    )


def _add_dummy(
    rows: Sequence[tuple[Features, ...]], dummy: Features, vision: VisionProcessor
) -> list[tuple[Features, ...]]:
    """Append a dummy image or video to the shortest sequence of all rows."""
    places = [(number, index) for number, row in enumerate(rows) for index in range(len(row))]
    number, index = min(places, key=lambda place: len(rows[place[0]][place[1]]["input_ids"]))
    row = rows[number]
    extended = (*row[:index], _append_dummy(row[index], dummy, vision), *row[index + 1 :])
    return [*rows[:number], extended, *rows[number + 1 :]]


def _append_dummy(sequence: Features, dummy: Features, vision: VisionProcessor) -> Features:
    """Append a dummy image or video without target tokens; in a pack, it is a separate row (decisions/601)."""
    tokens = dummy["input_ids"]
    appended = {"labels": torch.full_like(tokens, IGNORE_INDEX), "weights": torch.zeros(len(tokens)), **dummy}
    if POSITION_IDS in sequence:
        uses_mrope = MROPE_POSITION_IDS in sequence
        appended = add_position_ids(appended, vision.compute_mrope_position_ids if uses_mrope else None)
    joined = {name: torch.cat((sequence[name], appended[name])) for name in _JOINED_FEATURES if name in sequence}
    return {**sequence, **joined, **{name: value for name, value in dummy.items() if name not in _JOINED_FEATURES}}
