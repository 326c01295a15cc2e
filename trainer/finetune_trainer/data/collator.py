"""Collates samples into the padded tensors of one micro-batch, with pixel inputs for vision-language models."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from finetune_trainer.data.packing import MROPE_POSITION_IDS, POSITION_IDS
from finetune_trainer.data.token_dataset import IGNORE_INDEX, REFERENCE_LOGPS, Features
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.vision.processor import VisionProcessor

Collate = Callable[[Sequence[Any]], Features]

_TOKEN_FEATURES = ("input_ids", "labels", "weights", POSITION_IDS, MROPE_POSITION_IDS)
_PADDED_FEATURES = (*_TOKEN_FEATURES, REFERENCE_LOGPS)  # all other features are pixel inputs
_PIXEL_INPUTS = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}


class Collator:
    """Pads the sequences of a micro-batch on the right to equal length.

    In a batch of preference pairs, all chosen sequences precede all rejected ones. In a batch of packs, every padding
    token has position id 0, so that attention treats it as a separate row.
    """

    def __init__(self, pad_id: int) -> None:
        zeros = dict.fromkeys(("weights", POSITION_IDS, MROPE_POSITION_IDS, REFERENCE_LOGPS), 0.0)
        self._padding_values = {"input_ids": float(pad_id), "labels": float(IGNORE_INDEX), **zeros}

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> Features:
        """Return the padded features and the attention mask, each (rows x sequences per row, longest sequence).

        Log-probabilities of a reference model are (rows x sequences per row, 1).
        """
        sequences = [row[index] for index in range(len(rows[0])) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        batch = {
            name: pad([row[name] for row in sequences], batch_first=True, padding_value=self._padding_values[name])
            for name in sequences[0]
        }
        ones = [torch.ones_like(sequence["input_ids"]) for sequence in sequences]
        return {**batch, "attention_mask": pad(ones, batch_first=True, padding_value=0)}


class MultimodalCollator:
    """Pads the token features and concatenates the pixel inputs of all sequences in order.

    If a batch lacks a modality that every rank must process, a dummy image or video is appended to its shortest
    sequence. Causal attention hides the dummy from the other tokens, and its labels are ignored. Thus every rank runs
    the vision tower equally often in every step, as the collectives for trained or sharded weights require, and at the
    same positions of the autograd graph as with real media.
    """

    def __init__(self, pad_id: int, vision: VisionProcessor, *, required_modalities: Collection[Modality]) -> None:
        self._collate = Collator(pad_id)
        self._vision = vision
        self._dummies = {
            _PIXEL_INPUTS[modality]: vision.build_dummy(modality) for modality in sorted(required_modalities)
        }

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> Features:
        """Return the padded token features, the pixel inputs and, if the model uses them, token type ids."""
        sequences = [row[index] for index in range(len(rows[0])) for row in rows]
        for pixels, dummy in self._dummies.items():
            if not any(pixels in sequence for sequence in sequences):
                shortest = min(range(len(sequences)), key=lambda index: len(sequences[index]["input_ids"]))
                sequences[shortest] = _append_dummy(sequences[shortest], dummy, self._vision)
        batch = self._collate([({name: row[name] for name in _PADDED_FEATURES if name in row},) for row in sequences])
        names = dict.fromkeys(name for row in sequences for name in row if name not in _PADDED_FEATURES)
        pixel_inputs = {name: torch.cat([row[name] for row in sequences if name in row]) for name in names}
        return {**batch, **pixel_inputs, **self._vision.token_type_ids(batch["input_ids"])}


def _append_dummy(sequence: Features, dummy: Features, vision: VisionProcessor) -> Features:
    """Append a dummy image or video without target tokens; in a pack, it is a separate row (decisions/601)."""
    tokens = dummy["input_ids"]
    appended = {"labels": torch.full_like(tokens, IGNORE_INDEX), "weights": torch.zeros(len(tokens)), **dummy}
    if POSITION_IDS in sequence:
        appended[POSITION_IDS] = torch.arange(len(tokens))
    if MROPE_POSITION_IDS in sequence:
        appended[MROPE_POSITION_IDS] = vision.compute_mrope_position_ids(dummy)
    joined = {name: torch.cat((sequence[name], appended[name])) for name in _TOKEN_FEATURES if name in sequence}
    return {**sequence, **joined, **{name: value for name, value in dummy.items() if name not in _TOKEN_FEATURES}}
