"""What a model that sees is shown in a forecast."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, takewhile

import torch
from PIL import Image

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.processor import Vision
from finetune_trainer.vision.video_frames import Size
from finetune_trainer.vision.video_processor import Features

_EDGES = range(28, 8193, 28)  # pixels; of families that see images of any size
_TILES = range(1, 13)  # of 448 pixels; of families that cut images into them
_TILE = 448


@dataclass(frozen=True)
class Sight:
    """How a model sees, what of it is frozen, and a sequence that shows it something."""

    vision: Vision
    frozen: tuple[str, ...]
    sample: Features  # input_ids (tokens), and pixels as the model takes them

    def batch(self, rows: int) -> Features:
        """The sample, so many times."""
        ids = self.sample["input_ids"].repeat(rows, 1)
        pixels = {name: torch.cat([value] * rows) for name, value in self.sample.items() if name != "input_ids"}
        return {"input_ids": ids, **pixels, **self.vision.types(ids)}


def blank_sample(vision: Vision, length: int) -> Features:
    """So many tokens, as many as can be of one image. Raises InvalidSpec where not even the smallest image fits."""
    found = max(_fitting(vision, length), default=None, key=lambda each: each[0])
    if found is None:
        raise InvalidSpec(
            f"spec.dataset.maxLength: {length} tokens are fewer than the smallest image takes; raise it, or lower"
            " spec.model.maxPixels"
        )
    _, size = found
    shown = vision.seen.tokenizer(vision.write_size(size), add_special_tokens=False)["input_ids"]
    words = torch.full((length - len(shown),), a_word(vision))
    height, width = size
    pixels = vision.process([Image.new("RGB", (width, height), (128, 128, 128))])
    return {"input_ids": torch.cat((torch.tensor(shown), words)), **pixels}


def _fitting(vision: Vision, length: int) -> Iterator[tuple[int, Size]]:
    """Sizes with their tokens, the smallest image first."""
    if vision.family.any_size:
        squares = ((vision.count((edge, edge)), (edge, edge)) for edge in _EDGES)
        yield from takewhile(lambda found: found[0] <= length, squares)
        return
    for high, wide in product(_TILES, _TILES):
        size = _TILE * high, _TILE * wide
        if high * wide <= max(_TILES) and (tokens := vision.count(size)) <= length:
            yield tokens, size


def a_word(vision: Vision) -> int:
    """A token that stands for nothing that is shown."""
    config = vision.seen.config
    special = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")}
    return next(number for number in range(len(special) + 1) if number not in special)
