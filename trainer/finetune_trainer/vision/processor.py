"""Renders images and videos as placeholder tokens, and loads pixel inputs for the vision tower (decisions/602)."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from PIL import Image, UnidentifiedImageError
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.cpu_limit import limit_cpu_seconds
from finetune_trainer.data_sources.file_digests import compute_media_checksum
from finetune_trainer.data_sources.media import MediaItem, Modality
from finetune_trainer.errors import DatasetError, InvalidSpec
from finetune_trainer.storage_faults import check_is_about_content
from finetune_trainer.vision.families import FAMILIES, ModelComponents, VisionFamily
from finetune_trainer.vision.video_frames import Size, open_upright_image, read_upright_size
from finetune_trainer.vision.video_processor import (
    VIDEO_FIELDS,
    VIDEO_INPUTS,
    Features,
    VideoProcessor,
    build_video_processor,
)

_IMAGE_INPUTS = ("pixel_values", "image_grid_thw")  # outputs of the image processor that the model requires as inputs
VISION_INPUTS = (*_IMAGE_INPUTS, *VIDEO_INPUTS, "mm_token_type_ids", "token_type_ids")
# fields of spec.model that are rejected for text models
_VISION_FIELDS = ("freeze", "maxPixels", "minPixels", "maxTiles", *VIDEO_FIELDS)
_MAX_CPU_SECONDS = 300  # for one image or video
_DUMMY_EDGE = 56  # height and width of a dummy image in pixels


@dataclass(frozen=True)
class VisionProcessor:
    """Renders placeholder tokens and computes pixel inputs for one vision-language model."""

    family: VisionFamily
    components: ModelComponents
    video_processor: VideoProcessor | None = None  # None if the family does not support videos

    @property
    def placeholders(self) -> dict[Modality, str]:
        """Text that the chat template renders for an item of each supported modality."""
        image = {Modality.IMAGE: self.family.render_placeholder(self.components)}
        return {**image, Modality.VIDEO: self.video_processor.placeholder} if self.video_processor else image

    @property
    def visual_token_ids(self) -> tuple[int, ...]:
        """Ids of the placeholder tokens that image and video embeddings replace."""
        videos = (self.components.config.video_token_id,) if self.video_processor else ()
        return (self.components.config.image_token_id, *videos)

    @property
    def cache_description(self) -> str:
        """Settings that determine the numbers of image and video tokens, for the cache key."""
        sampling = self.video_processor.sampling if self.video_processor else None
        return f"{self.components.processor.to_json_string()}{self.components.config.to_json_string()}{sampling}"

    def render(self, origin: str, item: MediaItem) -> str:
        """Return the placeholder tokens of an image or video as text.

        Reads only the image header or the first frame.

        origin: origin of the row, for error messages. Raises: DatasetError if the file is missing or invalid.
        """
        with _translate_media_errors(origin, item):
            if item.modality is Modality.VIDEO:
                return self._supported_video_processor.render(item)
            return self.render_image(read_upright_size(_open_source(item)))

    def identify(self, origin: str, item: MediaItem) -> MediaItem:
        """Return the item with the checksum of its files. Parameters and errors are those of `render`."""
        with _translate_media_errors(origin, item):
            return replace(item, checksum=compute_media_checksum(item.paths))

    def render_image(self, size: Size) -> str:
        """Return the placeholder tokens of an image with this height and width as text."""
        return self.family.render_image(self.components, size)

    def count_image_tokens(self, size: Size) -> int:
        """Return the number of tokens of an image with this height and width, including delimiters."""
        return len(self.components.tokenizer(self.render_image(size), add_special_tokens=False)["input_ids"])

    def load_pixels(self, origin: str, media: tuple[MediaItem, ...]) -> Features:
        """Return the concatenated pixel inputs of the images and of the videos.

        origin: origin of the row, for error messages. Raises: DatasetError if a file is missing or invalid.
        """
        images, videos = [], []
        for item in media:
            with _translate_media_errors(origin, item):
                if item.modality is Modality.VIDEO:
                    videos.append(self._supported_video_processor.load_pixels(item))
                else:
                    images.append(open_upright_image(_open_source(item)))
        video_inputs = {name: torch.cat([video[name] for video in videos]) for name in (videos[0] if videos else ())}
        return {**(self.process_images(images) if images else {}), **video_inputs}

    def build_dummy(self, modality: Modality) -> Features:
        """Build input ids and pixel inputs of a gray image or video, for batches without media."""
        if modality is Modality.VIDEO:
            text, pixels = self._supported_video_processor.build_dummy(_DUMMY_EDGE)
        else:
            image = Image.new("RGB", (_DUMMY_EDGE, _DUMMY_EDGE), (128, 128, 128))
            text, pixels = self.render_image((_DUMMY_EDGE, _DUMMY_EDGE)), self.process_images([image])
        tokens = self.components.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": torch.tensor(tokens), **pixels}

    def token_type_ids(self, input_ids: torch.Tensor) -> Features:
        """Return the model input that marks image tokens (1) and video tokens (2); empty if the model has none."""
        if self.family.type_ids_input is None:
            return {}
        types = (input_ids == self.components.config.image_token_id).long()
        if self.video_processor:
            types += 2 * (input_ids == self.components.config.video_token_id)
        return {self.family.type_ids_input: types}

    def compute_mrope_position_ids(self, row: Features) -> torch.Tensor:
        """Compute the M-RoPE position ids of an unpacked row as the model does, (seq, 3)."""
        ids = row["input_ids"]
        grids = {name: row[name] for name in row if name in VISION_INPUTS and not name.startswith("pixel_values")}
        if not grids:
            return torch.arange(len(ids)).unsqueeze(1).expand(-1, 3)
        model_class = MODEL_MAPPING[type(self.components.config)]
        model = model_class.__new__(model_class)  # skip __init__, because get_rope_index uses no weights
        torch.nn.Module.__init__(model)
        model.config = self.components.config
        positions, _ = model.get_rope_index(ids.unsqueeze(0), **{**grids, **self.token_type_ids(ids.unsqueeze(0))})
        position_ids: torch.Tensor = positions[:, 0].T
        return position_ids

    @property
    def _supported_video_processor(self) -> VideoProcessor:
        assert self.video_processor is not None  # expand_placeholders rejects videos that the family does not support
        return self.video_processor

    def process_images(self, images: list[Image.Image]) -> Features:
        """Return the pixel inputs of the images."""
        outputs = self.components.processor(images, return_tensors="pt", **(self.family.processor_options or {}))
        return {name: cast(torch.Tensor, outputs[name]) for name in _IMAGE_INPUTS if name in outputs}


def build_vision_processor(
    source: ModelSource, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, local: ModelSource
) -> VisionProcessor | None:
    """Build the vision processor of a model; return None for a text model and with textOnly.

    local: source with the name and revision from which files are loaded.
    Raises: InvalidSpec if the spec has fields that the model does not support.
    """
    if source.text_only:
        return None
    family = FAMILIES.get(config.model_type)
    if family is None:
        specified = [name for name in _VISION_FIELDS if name in source.model_dump(by_alias=True, exclude_none=True)]
        if specified:
            raise InvalidSpec(
                f'spec.model.{specified[0]}: model "{source.name}" is of type {config.model_type}, which is trained on'
                " text only; leave it out, and any learning rates of vision and aligner in spec.training, or choose a"
                f" vision-language model of type {', '.join(FAMILIES)}"
            )
        return None
    processor = AutoImageProcessor.from_pretrained(local.name, revision=local.revision)
    _set_pixel_limits(source, family, processor)
    _set_tile_limit(source, family, processor)
    components = ModelComponents(config, processor, tokenizer)
    return VisionProcessor(family, components, build_video_processor(source, family, components, local))


@contextmanager
def _translate_media_errors(origin: str, item: MediaItem) -> Iterator[None]:
    """Translate errors that occur while media are read or processed into DatasetError with row and file."""
    subject = f"{origin}: {item}"
    too_slow = DatasetError(f"decoding it needs more than {_MAX_CPU_SECONDS} s of CPU time")
    try:
        with limit_cpu_seconds(_MAX_CPU_SECONDS, too_slow):
            yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DatasetError(
            f"{origin}: {item.modality} {error.filename} does not exist; correct its path, which is relative to the"
            " folder of the rows unless it begins with /, or mount the volume that holds it (spec.volumes)"
        ) from error
    except UnidentifiedImageError as error:
        raise DatasetError(f"{subject} is not a readable image; replace it, or remove the row") from error
    except (DatasetError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        check_is_about_content(error, f"{subject} cannot be read")  # onBadRow must not skip a valid row
        raise DatasetError(f"{subject} cannot be read ({error}); replace it, or remove the row") from error


def _open_source(item: MediaItem) -> str | io.BytesIO:
    """Return the path of the item, or a file object if its bytes are embedded in the row."""
    return io.BytesIO(item.data) if item.data else item.path


def _set_pixel_limits(source: ModelSource, family: VisionFamily, processor: object) -> None:
    """Set minPixels and maxPixels of the spec in the image processor, which is saved with the result."""
    specified = {"shortest_edge": source.min_pixels, "longest_edge": source.max_pixels}
    limits = {edge: pixels for edge, pixels in specified.items() if pixels is not None}
    if not limits:
        return
    if not family.has_dynamic_resolution:
        name = "maxPixels" if source.max_pixels else "minPixels"
        raise InvalidSpec(
            f'spec.model.{name}: model "{source.name}" scales every image to the same size; leave maxPixels and'
            " minPixels out"
        )
    current = dict(processor.size)  # type: ignore[attr-defined]
    size = {edge: limits.get(edge, current[edge]) for edge in specified}
    if size["shortest_edge"] > size["longest_edge"]:
        raise InvalidSpec(
            f"spec.model: minPixels {size['shortest_edge']} is more than maxPixels {size['longest_edge']}; images"
            " cannot have both"
        )
    processor.size = type(processor.size)(**size)  # type: ignore[attr-defined]


def _set_tile_limit(source: ModelSource, family: VisionFamily, processor: Any) -> None:
    """Set maxTiles of the spec in the image processor, which is saved with the result."""
    if source.max_tiles is None:
        return
    if not family.splits_images_into_tiles:
        raise InvalidSpec(
            f'spec.model.maxTiles: model "{source.name}" does not divide images into tiles; leave maxTiles out'
            f"{', or set maxPixels' if family.has_dynamic_resolution else ''}"
        )
    if source.max_tiles < processor.min_patches:
        raise InvalidSpec(
            f"spec.model.maxTiles: {source.max_tiles} is less than the {processor.min_patches} tiles (min_patches) of"
            f' the processor of model "{source.name}"; raise it'
        )
    processor.max_patches = source.max_tiles
