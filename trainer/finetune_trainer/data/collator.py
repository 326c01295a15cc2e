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
from finetune_trainer.data.packing import MROPE_POSITION_IDS, POSITION_IDS, MropeFunction, add_position_ids
from finetune_trainer.data.token_dataset import IGNORE_INDEX, REFERENCE_LOGPS, Features
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.varlen_inputs import build_varlen_inputs, split_by_position_ids
from finetune_trainer.vision.processor import VisionProcessor

Collate = Callable[[Sequence[Any]], MicroBatch]

_TOKEN_FEATURES = ("input_ids", "labels", "weights", POSITION_IDS, MROPE_POSITION_IDS)
_SEQUENCE_FEATURES = (*_TOKEN_FEATURES, REFERENCE_LOGPS)  # all other features are pixel inputs
_PIXEL_INPUTS = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}


@dataclass(frozen=True)
class SequenceLayout:
    """Arrangement of the sequences of a micro-batch in the input tensors."""

    padding_free: bool = False  # True: all sequences in one row; False: one padded row per sequence or pack
    pad_multiple: int = 1  # the length of padded rows is a multiple of this
    masks_padding: bool = True  # whether padded rows have an attention mask


class Collator:
    """Arranges the sequences of a micro-batch, and finds their target tokens.

    In a batch of preference pairs, all chosen sequences precede all rejected ones.
    """

    def __init__(self, pad_id: int, layout: SequenceLayout, compute_mrope_ids: MropeFunction | None = None) -> None:
        self._pad_id = pad_id
        self._layout = layout
        self._compute_mrope_ids = compute_mrope_ids

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> MicroBatch:
        """Return the micro-batch. Its input ids are (1, tokens), or (rows x sequences per row, longest sequence)."""
        sequences = _flatten(rows)
        packs = [_split_pack(sequence) for sequence in sequences]  # lengths of the rows of each pack
        lengths = tuple(chain.from_iterable(packs))
        if self._layout.padding_free:
            inputs = {**_build_row(sequences, self._compute_mrope_ids), **build_varlen_inputs(lengths)}
            row_starts = list(accumulate((sum(pack) for pack in packs[:-1]), initial=0))
        else:
            inputs = _build_padded_rows(sequences, self._pad_id, self._layout)
            row_starts = [index * inputs["input_ids"].shape[1] for index in range(len(sequences))]
        starts = [
            row_start + offset
            for row_start, pack in zip(row_starts, packs, strict=True)
            for offset in accumulate(pack[:-1], initial=0)
        ]
        targets = _find_targets(sequences, row_starts, torch.tensor(starts))
        has_reference = REFERENCE_LOGPS in sequences[0]
        return MicroBatch(
            inputs,
            targets,
            lengths,
            target_counts=tuple(torch.bincount(targets.sequences, minlength=len(lengths)).tolist()),
            reference_logps=torch.cat([row[REFERENCE_LOGPS] for row in sequences]) if has_reference else None,
        )


class MultimodalCollator:
    """Arranges the token features, and concatenates the pixel inputs of all sequences in order.

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
        self._collate = Collator(pad_id, layout, compute_mrope_ids)
        self._vision = vision
        self._dummies = {
            _PIXEL_INPUTS[modality]: vision.build_dummy(modality) for modality in sorted(required_modalities)
        }

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> MicroBatch:
        """Return the micro-batch, with the pixel inputs and, if the model uses them, token type ids."""
        sequences = _flatten(rows)
        for pixels, dummy in self._dummies.items():
            if not any(pixels in sequence for sequence in sequences):
                shortest = min(range(len(sequences)), key=lambda index: len(sequences[index]["input_ids"]))
                sequences[shortest] = _append_dummy(sequences[shortest], dummy, self._vision)
        batch = self._collate([(sequence,) for sequence in sequences])
        names = dict.fromkeys(name for row in sequences for name in row if name not in _SEQUENCE_FEATURES)
        pixel_inputs = {name: torch.cat([row[name] for row in sequences if name in row]) for name in names}
        type_ids = self._vision.token_type_ids(batch.inputs["input_ids"])
        return replace(batch, inputs={**batch.inputs, **pixel_inputs, **type_ids})


def _split_pack(sequence: Features) -> list[int]:
    """Return the number of tokens of each row of a pack, or of the sequence if it is no pack."""
    if POSITION_IDS not in sequence:
        return [len(sequence["input_ids"])]
    return split_by_position_ids(sequence[POSITION_IDS])


def _flatten(rows: Sequence[tuple[Features, ...]]) -> list[Features]:
    """Return the first sequence of each row, then the second one of each row."""
    return [row[index] for index in range(len(rows[0])) for row in rows]


def _build_row(sequences: Sequence[Features], compute_mrope_ids: MropeFunction | None) -> dict[str, torch.Tensor]:
    """Return all sequences in one row without padding; input ids: (1, tokens)."""
    located = [add_position_ids(sequence, compute_mrope_ids) for sequence in sequences]

    def join(name: str) -> torch.Tensor:
        return torch.cat([sequence[name] for sequence in located]).unsqueeze(0)

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


def _stack_position_ids(positions: torch.Tensor, mrope_ids: torch.Tensor) -> torch.Tensor:
    """Return the position ids for models with M-RoPE, (4, batch, seq): text positions, then time, height and width."""
    return torch.cat((positions.unsqueeze(0), mrope_ids.permute(2, 0, 1)))


def _find_targets(sequences: Sequence[Features], row_starts: Sequence[int], starts: torch.Tensor) -> TargetTokens:
    """Return the target tokens; the first token of a row is never one.

    row_starts: index of the first token of each sequence or pack in the flattened input ids. starts: the same of each
    sequence or row of a pack, in ascending order.
    """
    indices = [(sequence["labels"][1:] != IGNORE_INDEX).nonzero()[:, 0] for sequence in sequences]
    positions = torch.cat([index + start for index, start in zip(indices, row_starts, strict=True)])

    def select(name: str) -> torch.Tensor:
        return torch.cat([row[name][1:][index] for row, index in zip(sequences, indices, strict=True)])

    return TargetTokens(
        positions,
        select("labels"),
        torch.searchsorted(starts, positions, right=True) - 1,
        select("weights") if "weights" in sequences[0] else None,
    )


def _append_dummy(sequence: Features, dummy: Features, vision: VisionProcessor) -> Features:
    """Append a dummy image or video without target tokens; in a pack, it is a separate row (decisions/601)."""
    tokens = dummy["input_ids"]
    appended = {"labels": torch.full_like(tokens, IGNORE_INDEX), "weights": torch.zeros(len(tokens)), **dummy}
    if POSITION_IDS in sequence:
        uses_mrope = MROPE_POSITION_IDS in sequence
        appended = add_position_ids(appended, vision.compute_mrope_position_ids if uses_mrope else None)
    joined = {name: torch.cat((sequence[name], appended[name])) for name in _TOKEN_FEATURES if name in sequence}
    return {**sequence, **joined, **{name: value for name, value in dummy.items() if name not in _TOKEN_FEATURES}}
