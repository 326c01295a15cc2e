"""Batches of a model that sees: pixels beside the tokens, and something that shows nothing where nothing is shown."""

from collections.abc import Collection, Sequence

import torch
from torch.utils.data import Dataset

from finetune_trainer.data.batch_sampler import Collator
from finetune_trainer.data.packing import AXES, POSITIONS
from finetune_trainer.data.token_dataset import FILLER, IGNORED, Features, TokenDataset
from finetune_trainer.data_sources.media import Kind
from finetune_trainer.vision.processor import Vision

_OF_TOKENS = ("input_ids", "labels", "weights", POSITIONS, AXES)  # what else a sequence has is of what it shows
_SHOWN_BY = {Kind.IMAGE: "pixel_values", Kind.VIDEO: "pixel_values_videos"}


class SeeingDataset(Dataset[tuple[Features, ...]]):
    """Rows with the pixels of their images and videos, which are read here, in the loader's process."""

    def __init__(self, rows: TokenDataset, vision: Vision) -> None:
        self._rows = rows
        self._vision = vision

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        place = "filler" if index == FILLER else self._rows.place(index)
        return tuple(
            {**tokens, **(self._vision.pixels(place, pictures) if pictures else {})}
            for tokens, pictures in zip(self._rows[index], self._rows.pictures(index), strict=True)
        )


class SeeingCollator:
    """Pads the tokens and joins the images and the videos of all sequences, in their order.

    A batch without any of a kind in `always` gets one that shows nothing: behind the end of its shortest sequence,
    where no token sees it and none is learned. So every rank runs the vision tower equally often in every step, as the
    collectives of trained or spread weights need it, and in the same places of the graph as for real ones.
    """

    def __init__(self, pad_id: int, vision: Vision, *, always: Collection[Kind]) -> None:
        self._collate = Collator(pad_id)
        self._vision = vision
        self._stand_ins = {_SHOWN_BY[kind]: vision.stand_in(kind) for kind in sorted(always)}

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> Features:
        sequences = [row[number] for number in range(len(rows[0])) for row in rows]
        for pixels, stand_in in self._stand_ins.items():
            if not any(pixels in sequence for sequence in sequences):
                shortest = min(range(len(sequences)), key=lambda index: len(sequences[index]["input_ids"]))
                sequences[shortest] = _followed_by(sequences[shortest], stand_in, self._vision)
        batch = self._collate([({name: each[name] for name in _OF_TOKENS if name in each},) for each in sequences])
        shown = {name: None for each in sequences for name in each if name not in _OF_TOKENS}
        seen = {name: torch.cat([each[name] for each in sequences if name in each]) for name in shown}
        return {**batch, **seen, **self._vision.types(batch["input_ids"])}


def _followed_by(sequence: Features, stand_in: Features, vision: Vision) -> Features:
    """Nothing of what stands in is learned. In a pack it is a row of its own."""
    tokens = stand_in["input_ids"]
    behind = {"labels": torch.full_like(tokens, IGNORED), "weights": torch.zeros(len(tokens)), **stand_in}
    if POSITIONS in sequence:
        behind[POSITIONS] = torch.arange(len(tokens))
    if AXES in sequence:
        behind[AXES] = vision.axes(stand_in)
    joined = {name: torch.cat((sequence[name], behind[name])) for name in _OF_TOKENS if name in sequence}
    return {**sequence, **joined, **{name: value for name, value in stand_in.items() if name not in _OF_TOKENS}}
