"""From a file to what the model sees: its size for the text, its pixels for the vision tower."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from PIL import Image, UnidentifiedImageError
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.atomic_files import is_storage_fault
from finetune_trainer.data_sources.media import Kind, Picture
from finetune_trainer.errors import DatasetError, InvalidSpec
from finetune_trainer.vision.families import FAMILIES, Family, Seen
from finetune_trainer.vision.video_frames import Size, open_upright, upright_size
from finetune_trainer.vision.video_processor import FILM, OF_VIDEOS, Features, VideoEye, describe_videos

_PIXELS = ("pixel_values", "image_grid_thw")  # what models take of what processors give
SEEN = (*_PIXELS, *FILM, "mm_token_type_ids", "token_type_ids")  # inputs that only a model that sees takes
_OF_SIGHT = ("freeze", "maxPixels", "minPixels", *OF_VIDEOS)  # fields that a model which only reads refuses
_SMALL = 56  # edge of an image that only has to be there


@dataclass(frozen=True)
class Vision:
    """A model's eye: the processor of its images and the rules of its family."""

    family: Family
    seen: Seen
    videos: VideoEye | None = None  # of a family that sees them

    @property
    def placeholders(self) -> dict[Kind, str]:
        """What the chat template writes for what is shown, of each kind that the family sees."""
        image = {Kind.IMAGE: self.family.placeholder(self.seen)}
        return {**image, Kind.VIDEO: self.videos.placeholder} if self.videos else image

    @property
    def visual_tokens(self) -> tuple[int, ...]:
        """Ids that images and videos take the places of."""
        videos = (self.seen.config.video_token_id,) if self.videos else ()
        return (self.seen.config.image_token_id, *videos)

    @property
    def described(self) -> str:
        """All that decides how long an image or a video is, for the cache."""
        sampling = self.videos.sampling if self.videos else None
        return f"{self.seen.processor.to_json_string()}{self.seen.config.to_json_string()}{sampling}"

    def write(self, place: str, picture: Picture) -> str:
        """What stands for it in the text. Reads of an image its header only, of a video its first frame."""
        with _explained(place, picture):
            if picture.kind is Kind.VIDEO:
                return self._eye.write(picture)
            return self.write_size(upright_size(_source(picture)))

    def write_size(self, size: Size) -> str:
        return self.family.write(self.seen, size)

    def count(self, size: Size) -> int:
        """Tokens of an image, with those around it."""
        return len(self.seen.tokenizer(self.write_size(size), add_special_tokens=False)["input_ids"])

    def pixels(self, place: str, pictures: tuple[Picture, ...]) -> Features:
        """Of the images one after the other, and of the videos, as the model takes them."""
        images, videos = [], []
        for picture in pictures:
            with _explained(place, picture):
                if picture.kind is Kind.VIDEO:
                    videos.append(self._eye.pixels(picture))
                else:
                    images.append(open_upright(_source(picture)))
        joined = {name: torch.cat([video[name] for video in videos]) for name in (videos[0] if videos else ())}
        return {**(self.process(images) if images else {}), **joined}

    def stand_in(self, kind: Kind) -> Features:
        """Tokens and pixels of an image or a video that shows nothing, for batches without one."""
        if kind is Kind.VIDEO:
            text, pixels = self._eye.blank(_SMALL)
        else:
            blank = Image.new("RGB", (_SMALL, _SMALL), (128, 128, 128))
            text, pixels = self.write_size((_SMALL, _SMALL)), self.process([blank])
        tokens = self.seen.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": torch.tensor(tokens), **pixels}

    def types(self, tokens: torch.Tensor) -> Features:
        """The input that tells the tokens of images and videos from others, of models that want it."""
        if self.family.types is None:
            return {}
        types = (tokens == self.seen.config.image_token_id).long()
        if self.videos:
            types += 2 * (tokens == self.seen.config.video_token_id)
        return {self.family.types: types}

    def axes(self, row: Features) -> torch.Tensor:
        """(tokens, 3): the positions that the model itself gives a row with images or videos."""
        ids = row["input_ids"]
        grids = {name: row[name] for name in row if name in SEEN and not name.startswith("pixel_values")}
        if not grids:
            return torch.arange(len(ids)).unsqueeze(1).expand(-1, 3)
        kind = MODEL_MAPPING[type(self.seen.config)]
        model = kind.__new__(kind)  # its rule reads the config alone
        torch.nn.Module.__init__(model)
        model.config = self.seen.config
        positions, _ = model.get_rope_index(ids.unsqueeze(0), **{**grids, **self.types(ids.unsqueeze(0))})
        found: torch.Tensor = positions[:, 0].T
        return found

    @property
    def _eye(self) -> VideoEye:
        assert self.videos is not None  # words.expand refuses videos that the model does not see
        return self.videos

    def process(self, images: list[Image.Image]) -> Features:
        """Pixels as the model takes them."""
        found = self.seen.processor(images, return_tensors="pt", **(self.family.options or {}))
        return {name: cast(torch.Tensor, found[name]) for name in _PIXELS if name in found}


def describe_vision(source: ModelSource, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Vision | None:
    """None for a model that only reads. Raises InvalidSpec where the spec asks such a model to see."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        asked = [name for name in _OF_SIGHT if name in source.model_dump(by_alias=True, exclude_none=True)]
        if asked:
            raise InvalidSpec(
                f'spec.model.{asked[0]}: model "{source.name}" is of type {config.model_type}, which only reads here;'
                " leave it out, with the rates of vision and aligner in spec.training if there are any, or take a model"
                f" that sees, of type {', '.join(FAMILIES)}"
            )
        return None
    processor = AutoImageProcessor.from_pretrained(source.name)
    _resize(source, family, processor)
    seen = Seen(config, processor, tokenizer)
    return Vision(family, seen, describe_videos(source, family, seen))


@contextmanager
def _explained(place: str, picture: Picture) -> Iterator[None]:
    """What the libraries and the processor say, as an error that names row and file."""
    named = f"{place}: {picture}"
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DatasetError(
            f"{place}: {picture.kind} {error.filename} does not exist; correct its path, which begins at the folder of"
            " the rows unless it begins with /, or mount the volume that holds it (spec.volumes)"
        ) from error
    except UnidentifiedImageError as error:
        raise DatasetError(f"{named} is no image that can be read; replace it, or take the row out") from error
    except (DatasetError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if is_storage_fault(error):
            raise  # such a row is not bad, and must not be skipped
        raise DatasetError(f"{named} cannot be read ({error}); replace it, or take the row out") from error


def _source(picture: Picture) -> str | io.BytesIO:
    return io.BytesIO(picture.data) if picture.data else picture.path


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
