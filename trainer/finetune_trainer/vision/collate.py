"""Batches of a model that sees: pixels beside the tokens, and an image that shows nothing where there is none."""

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from finetune_trainer.data.batches import Collator
from finetune_trainer.data.tokens import FILLER, IGNORED, Features, TokenDataset
from finetune_trainer.vision.images import Vision

_LEARNED = ("input_ids", "labels", "weights")  # of a sequence; what else it has is of its images


class SeeingDataset(Dataset[tuple[Features, ...]]):
    """Rows with the pixels of their images, which are read here, in the loader's process."""

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
    """Pads the tokens and joins the images of all sequences, in their order.

    A batch without images gets one that shows nothing, if `always`: behind the end of its shortest sequence, where no
    token sees it and none is learned. So every rank runs the vision tower in every step, as the collectives of trained
    or spread weights need it, and runs it in the same place of the graph as for a real image.
    """

    def __init__(self, pad_id: int, vision: Vision, *, always: bool) -> None:
        self._collate = Collator(pad_id)
        self._vision = vision
        self._stand_in = vision.stand_in() if always else None

    def __call__(self, rows: Sequence[tuple[Features, ...]]) -> Features:
        sequences = [row[number] for number in range(len(rows[0])) for row in rows]
        if self._stand_in is not None and not any("pixel_values" in sequence for sequence in sequences):
            shortest = min(range(len(sequences)), key=lambda index: len(sequences[index]["input_ids"]))
            sequences[shortest] = _followed_by(sequences[shortest], self._stand_in)
        batch = self._collate([({name: each[name] for name in _LEARNED if name in each},) for each in sequences])
        seeing = [each for each in sequences if "pixel_values" in each]
        pixels = {name: torch.cat([each[name] for each in seeing]) for name in _pixel_names(seeing)}
        return {**batch, **pixels, **self._vision.types(batch["input_ids"])}


def _followed_by(sequence: Features, image: Features) -> Features:
    """Nothing of the image is learned."""
    tokens = image["input_ids"]
    behind = {"labels": torch.full_like(tokens, IGNORED), "weights": torch.zeros(len(tokens)), **image}
    return {
        name: torch.cat((sequence[name], value)) if name in sequence else value
        for name, value in behind.items()
        if name in sequence or name not in _LEARNED
    }


def _pixel_names(seeing: Sequence[Features]) -> list[str]:
    return [name for name in seeing[0] if name not in _LEARNED] if seeing else []
