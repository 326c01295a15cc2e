"""What each family of vision-language models calls its parts, and how images and videos are written for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_each
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_all

from finetune_trainer.vision.video_frames import Choose, Film, Sampling, Size


@dataclass(frozen=True)
class Seen:
    """What a family's rules look at."""

    config: PretrainedConfig
    processor: BaseImageProcessor
    tokenizer: PreTrainedTokenizerBase

    def token(self, number: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(number))

    @property
    def image_token(self) -> str:
        """That one embedding of an image takes the place of."""
        return self.token(self.config.image_token_id)

    @property
    def video_token(self) -> str:
        return self.token(self.config.video_token_id)


@dataclass(frozen=True)
class Videos:
    """How a family sees videos."""

    processor: str  # the class in transformers that prepares them for serving
    pixels: tuple[int, int]  # least and most, where the model does not say
    choose: Choose
    resize: Callable[[Seen, Sampling, Film], Size]
    write: Callable[[Seen, Film, int], str]  # the text that a video becomes, with so many tokens for each two frames
    placeholder: Callable[[Seen], str] = lambda seen: seen.video_token  # what the chat template writes for a video
    timed: bool = False  # the model is told the seconds between two frames


@dataclass(frozen=True)
class Family:
    """One architecture. Names are prefixes of modules; what neither sees nor aligns is language."""

    vision: str
    aligner: tuple[str, ...]  # maybe inside of vision
    write: Callable[[Seen, Size], str]  # the text that an image of that size becomes
    placeholder: Callable[[Seen], str] = lambda seen: seen.image_token  # what the chat template writes for an image
    types: str | None = None  # the input that tells image tokens from others
    packs: bool = True  # rows of a pack are kept apart, whatever they show
    has_axes: bool = False  # image tokens have positions in time, height and width
    any_size: bool = False  # an image has as many tokens as its pixels ask for
    videos: Videos | None = None
    options: Mapping[str, Any] | None = None  # of the image processor
    unreached: Callable[[PretrainedConfig], str | None] = lambda _config: None  # a pattern: what no image runs through


def _qwen(seen: Seen, size: Size) -> str:
    patches = seen.processor.get_number_of_image_patches(*size, {})
    return seen.image_token * int(patches // seen.processor.merge_size**2)


def _internvl(seen: Seen, size: Size) -> str:
    tiles = seen.processor.get_number_of_image_patches(*size, {"crop_to_patches": True})
    start = getattr(seen.tokenizer, "start_image_token", "<img>")
    end = getattr(seen.tokenizer, "end_image_token", "</img>")
    return f"{start}{seen.image_token * (tiles * seen.config.image_seq_length)}{end}"


def _llava(seen: Seen, _size: Size) -> str:
    """Always the same: CLIP keeps its class token unless the default strategy drops it."""
    vision = seen.config.vision_config
    has_class_token = vision.model_type == "clip_vision_model"
    keeps_it = has_class_token and seen.config.vision_feature_select_strategy == "full"
    return seen.image_token * int((vision.image_size // vision.patch_size) ** 2 + keeps_it)


def _llava_unreached(config: PretrainedConfig) -> str:
    """Layers behind the last whose output is taken, which LLaVA 1.5's is not, and the norm of CLIP's summary."""
    layers, taken = config.vision_config.num_hidden_layers, config.vision_feature_layer
    last = max(layer if layer >= 0 else layers + 1 + layer for layer in ([taken] if isinstance(taken, int) else taken))
    behind = "|".join(str(layer) for layer in range(last, layers))
    names = ["post_layernorm", *([rf"layers\.(?:{behind})"] if behind else [])]
    return rf"model\.vision_tower\.(?:.*\.)?(?:{'|'.join(names)})(?=\.|$)"


def _gemma3(seen: Seen, _size: Size) -> str:
    start, end = (seen.token(number) for number in (seen.config.boi_token_index, seen.config.eoi_token_index))
    return f"\n\n{start}{seen.image_token * seen.config.mm_tokens_per_image}{end}\n\n"


def _qwen_vl(videos: Videos, *aligner: str) -> Family:
    return Family(
        "model.visual", aligner, _qwen, types="mm_token_type_ids", has_axes=True, any_size=True, videos=videos
    )


def _count(sampling: Sampling, total: int, fps: float) -> float:
    return min(max(total / fps * sampling.fps, sampling.min_frames), sampling.max_frames, total)


def _qwen2_choose(sampling: Sampling, total: int, fps: float) -> tuple[int, ...]:
    """An even number, each the first of its share."""
    even = max(int(_count(sampling, total, fps)) // 2 * 2, 1)
    return tuple(number * total // even for number in range(even))


def _qwen2_resize(seen: Seen, sampling: Sampling, film: Film) -> Size:
    """The limits are those of one frame."""
    factor = seen.processor.patch_size * seen.processor.merge_size
    limits = {"min_pixels": sampling.min_pixels, "max_pixels": sampling.max_pixels}
    height, width = resize_each(*film.size, factor=factor, **limits)
    return int(height), int(width)


def _qwen2_video(seen: Seen, film: Film, tokens: int) -> str:
    return seen.video_token * (len(film.moments) * tokens)


def _qwen3_choose(sampling: Sampling, total: int, fps: float) -> tuple[int, ...]:
    """From the first to the last."""
    count = max(int(_count(sampling, total, fps)), 1)
    return tuple(int(number) for number in np.linspace(0, total - 1, count).round())


def _qwen3_resize(seen: Seen, sampling: Sampling, film: Film) -> Size:
    """The limits are those of all frames together."""
    height, width = resize_all(
        max(len(film.numbers), seen.processor.temporal_patch_size),
        *film.size,
        temporal_factor=seen.processor.temporal_patch_size,
        factor=seen.processor.patch_size * seen.processor.merge_size,
        min_pixels=sampling.min_pixels,
        max_pixels=sampling.max_pixels,
    )
    return int(height), int(width)


def _qwen3_video(seen: Seen, film: Film, tokens: int) -> str:
    """Each two frames as an image of its own, behind the moment at which it is shown."""
    start, end = (seen.token(number) for number in _around(seen.config))
    return "".join(f"<{moment:.1f} seconds>{start}{seen.video_token * tokens}{end}" for moment in film.moments)


def _qwen3_placeholder(seen: Seen) -> str:
    start, end = (seen.token(number) for number in _around(seen.config))
    return f"{start}{seen.video_token}{end}"


def _around(config: PretrainedConfig) -> tuple[int, int]:
    return config.vision_start_token_id, config.vision_end_token_id


_QWEN2_VIDEOS = Videos(
    "Qwen2VLVideoProcessor", (128 * 28 * 28, 768 * 28 * 28), _qwen2_choose, _qwen2_resize, _qwen2_video
)
_QWEN3_VIDEOS = Videos(
    "Qwen3VLVideoProcessor",
    (4 * 32 * 32, 24_576 * 32 * 32),
    _qwen3_choose,
    _qwen3_resize,
    _qwen3_video,
    placeholder=_qwen3_placeholder,
)


_TOWER, _PROJECTOR = "model.vision_tower", ("model.multi_modal_projector",)

FAMILIES: dict[str, Family] = {  # by the config's model_type
    "qwen2_vl": _qwen_vl(_QWEN2_VIDEOS, "model.visual.merger"),
    "qwen2_5_vl": _qwen_vl(replace(_QWEN2_VIDEOS, timed=True), "model.visual.merger"),
    "qwen3_vl": _qwen_vl(_QWEN3_VIDEOS, "model.visual.merger", "model.visual.deepstack_merger_list"),
    "internvl": Family(_TOWER, _PROJECTOR, _internvl, options={"crop_to_patches": True}),
    "llava": Family(_TOWER, _PROJECTOR, _llava, unreached=_llava_unreached),
    "gemma3": Family(
        _TOWER,
        _PROJECTOR,
        _gemma3,
        placeholder=lambda seen: seen.token(seen.config.boi_token_index),
        types="token_type_ids",
        packs=False,
    ),
}
