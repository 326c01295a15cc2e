"""From an image file to what the model sees: its size for the text, its pixels for the vision tower."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from finetune_api.model_source import ModelSource
from finetune_trainer.data.pictures import Picture
from finetune_trainer.errors import DatasetError, InvalidSpec
from finetune_trainer.vision.families import FAMILIES, Family, Seen, Size

Features = dict[str, torch.Tensor]

_PIXELS = ("pixel_values", "image_grid_thw")  # what models take of what processors give
SEEN = (*_PIXELS, "mm_token_type_ids", "token_type_ids")  # inputs that only a model that sees takes
_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)  # of EXIF: height and width are swapped
_SMALL = 56  # edge of an image that only has to be there


@dataclass(frozen=True)
class Vision:
    """A model's eye: the processor of its images and the rules of its family."""

    family: Family
    seen: Seen

    @property
    def placeholder(self) -> str:
        """What the chat template writes for an image."""
        return self.family.placeholder(self.seen)

    @property
    def described(self) -> str:
        """All that decides how long an image is, for the cache."""
        return str(self.seen.processor.to_json_string()) + str(self.seen.config.to_json_string())

    def write(self, place: str, picture: Picture) -> str:
        """What stands for the image in the text. Reads its header only."""
        with _explained(place, picture), _open(picture) as image:
            width, height = image.size
            if image.getexif().get(_ORIENTATION) in _LYING:
                width, height = height, width
            return self.write_size((height, width))

    def write_size(self, size: Size) -> str:
        return self.family.write(self.seen, size)

    def pixels(self, place: str, pictures: tuple[Picture, ...]) -> Features:
        """Of the images one after the other, as the model takes them."""
        images = []
        for picture in pictures:
            with _explained(place, picture), _open(picture) as image:
                images.append(ImageOps.exif_transpose(image).convert("RGB"))
        return self._process(images)

    def stand_in(self) -> Features:
        """Tokens and pixels of an image that shows nothing, for batches without one."""
        blank = Image.new("RGB", (_SMALL, _SMALL), (128, 128, 128))
        text = self.write_size((_SMALL, _SMALL))
        tokens = self.seen.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": torch.tensor(tokens), **self._process([blank])}

    def types(self, tokens: torch.Tensor) -> Features:
        """The input that tells image tokens from others, of models that want it."""
        if self.family.types is None:
            return {}
        return {self.family.types: (tokens == self.seen.config.image_token_id).long()}

    def _process(self, images: list[Image.Image]) -> Features:
        found = self.seen.processor(images, return_tensors="pt", **(self.family.options or {}))
        return {name: cast(torch.Tensor, found[name]) for name in _PIXELS if name in found}


def describe_vision(source: ModelSource, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Vision | None:
    """None for a model that only reads. Raises InvalidSpec where the spec asks such a model to see."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        asked = [
            name
            for name, value in (
                ("freeze", source.freeze),
                ("maxPixels", source.max_pixels),
                ("minPixels", source.min_pixels),
            )
            if value is not None
        ]
        if asked:
            raise InvalidSpec(
                f'spec.model.{asked[0]}: model "{source.name}" is of type {config.model_type}, which only reads here;'
                " leave it out, with the rates of vision and aligner in spec.training if there are any, or take a model"
                f" that sees, of type {', '.join(FAMILIES)}"
            )
        return None
    processor = AutoImageProcessor.from_pretrained(source.name)
    _resize(source, family, processor)
    return Vision(family, Seen(config, processor, tokenizer))


@contextmanager
def _explained(place: str, picture: Picture) -> Iterator[None]:
    """What PIL and the processor say, as an error that names row and image."""
    named = f"{place}: image {picture.path or 'in the row'}"
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DatasetError(
            f"{named} does not exist; correct its path, which begins at the folder of the rows unless it begins with /,"
            " or mount the volume that holds it (spec.volumes)"
        ) from error
    except UnidentifiedImageError as error:
        raise DatasetError(f"{named} is no image that can be read; replace it, or take the row out") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DatasetError(f"{named} cannot be read ({error}); replace it, or take the row out") from error


def _open(picture: Picture) -> Image.Image:
    return Image.open(io.BytesIO(picture.data) if picture.data else Path(picture.path))


def _resize(source: ModelSource, family: Family, processor: object) -> None:
    """Sizes in pixels become the processor's own, which is saved with the result."""
    asked = {"shortest_edge": source.min_pixels, "longest_edge": source.max_pixels}
    given = {edge: pixels for edge, pixels in asked.items() if pixels is not None}
    if not given:
        return
    if not family.any_size:
        name = "maxPixels" if source.max_pixels else "minPixels"
        raise InvalidSpec(
            f'spec.model.{name}: model "{source.name}" sees every image at the same size; leave maxPixels and minPixels'
            " out"
        )
    found = dict(processor.size)  # type: ignore[attr-defined]
    size = {edge: given.get(edge, found[edge]) for edge in asked}
    if size["shortest_edge"] > size["longest_edge"]:
        raise InvalidSpec(
            f"spec.model: minPixels {size['shortest_edge']} is more than maxPixels {size['longest_edge']}; images"
            " cannot have both"
        )
    processor.size = type(processor.size)(**size)  # type: ignore[attr-defined]
