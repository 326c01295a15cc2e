"""Multimodal sample for the memory forecast of a vision-language model."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, takewhile

import torch
from PIL import Image

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.freeze import PEFT_PREFIX
from finetune_trainer.vision.processor import VisionProcessor
from finetune_trainer.vision.video_frames import Size
from finetune_trainer.vision.video_processor import Features

_EDGES = range(28, 8193, 28)  # image edges in pixels, for families that accept images of any size
_DEFAULT_MAX_TILES = 12  # for families that do not define a limit
_TILE_EDGE = 448  # pixels


@dataclass(frozen=True)
class VisionSample:
    """A vision-language model's processor, its frozen parameter groups and one multimodal sample."""

    vision: VisionProcessor
    frozen_groups: tuple[str, ...]  # any of vision, aligner, language
    features: Features  # input_ids: (seq,); pixel inputs in the format of the model

    def build_batch(self, batch_size: int) -> Features:
        """Return a batch of `batch_size` copies of the sample; input_ids is (batch_size, seq)."""
        ids = self.features["input_ids"].repeat(batch_size, 1)
        pixels = {name: torch.cat([value] * batch_size) for name, value in self.features.items() if name != "input_ids"}
        return {"input_ids": ids, **pixels, **self.vision.token_type_ids(ids)}


def build_blank_sample(vision: VisionProcessor, length: int) -> Features:
    """Build a sample of `length` tokens with the gray image that has the most visual tokens.

    Raises: InvalidSpec if not even the smallest image fits.
    """
    largest_image = max(
        _iterate_fitting_sizes(vision, length), default=None, key=lambda tokens_and_size: tokens_and_size[0]
    )
    if largest_image is None:
        raise InvalidSpec(
            f"spec.dataset.maxLength: {length} tokens are fewer than the smallest image needs; raise it, or lower"
            " spec.model.maxPixels or, for InternVL, maxTiles"
        )
    _, size = largest_image
    image_tokens = vision.components.tokenizer(vision.render_image(size), add_special_tokens=False)["input_ids"]
    text = torch.full((length - len(image_tokens),), find_text_token_id(vision))
    height, width = size
    pixels = vision.process_images([Image.new("RGB", (width, height), (128, 128, 128))])
    return {"input_ids": torch.cat((torch.tensor(image_tokens), text)), **pixels}


def _iterate_fitting_sizes(vision: VisionProcessor, length: int) -> Iterator[tuple[int, Size]]:
    """Yield the token count and the size (height, width) of each image that fits into `length` tokens."""
    if vision.family.has_dynamic_resolution:
        square_images = ((vision.count_image_tokens((edge, edge)), (edge, edge)) for edge in _EDGES)
        yield from takewhile(lambda square: square[0] <= length, square_images)
        return
    max_tiles = getattr(vision.components.processor, "max_patches", _DEFAULT_MAX_TILES)
    for rows, columns in product(range(1, max_tiles + 1), repeat=2):
        size = _TILE_EDGE * rows, _TILE_EDGE * columns
        if rows * columns <= max_tiles and (tokens := vision.count_image_tokens(size)) <= length:
            yield tokens, size


def find_text_token_id(vision: VisionProcessor) -> int:
    """Return a token id that is not a placeholder for images or videos."""
    config = vision.components.config
    special_token_ids = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")}
    return next(token_id for token_id in range(len(special_token_ids) + 1) if token_id not in special_token_ids)


def find_equal_tower_layers(model: torch.nn.Module, vision: VisionProcessor) -> torch.nn.ModuleList | None:
    """Return the layers of the vision tower; None if their memory may differ, or if the tower has no such list."""
    prefixes = vision.family.vision_prefix, PEFT_PREFIX + vision.family.vision_prefix
    modules = (module for name, module in model.named_modules() if name.startswith(prefixes))
    layers = max((m for m in modules if isinstance(m, torch.nn.ModuleList)), key=len, default=None)
    # The towers of Qwen2.5-VL and Qwen3-VL treat the layers at some indices differently.
    indices = (value for name, value in vars(vision.components.config.vision_config).items() if "index" in name)
    if layers is None or any(isinstance(value, list | tuple) for value in indices):
        return None
    shapes = {tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.parameters()) for layer in layers}
    return layers if len(shapes) == 1 else None
