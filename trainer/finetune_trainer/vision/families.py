"""Defines the supported families of vision-language models and their differences in modules and media processing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

from finetune_trainer.vision.video_frames import FrameChooser, FrameSampling, SampledVideo, Size


@dataclass(frozen=True)
class ModelComponents:
    """Config, image processor and tokenizer of a vision-language model."""

    config: PretrainedConfig
    processor: BaseImageProcessor
    tokenizer: PreTrainedTokenizerBase

    def get_token_text(self, token_id: int) -> str:
        """Return the token with this id as text."""
        return str(self.tokenizer.convert_ids_to_tokens(token_id))

    @property
    def image_token(self) -> str:
        """Placeholder token that is replaced by one image embedding."""
        return self.get_token_text(self.config.image_token_id)

    @property
    def video_token(self) -> str:
        """Placeholder token that is replaced by one video embedding."""
        return self.get_token_text(self.config.video_token_id)


@dataclass(frozen=True)
class VideoSupport:
    """Defines how a model family samples, scales and renders videos."""

    processor_class: str  # name of the class in transformers, saved with the result
    default_pixel_limits: tuple[int, int]  # (minimum, maximum), if the model does not define them
    choose_frames: FrameChooser
    resize: Callable[[ModelComponents, FrameSampling, SampledVideo], Size]
    # signature: (components, video, tokens per pair of frames) -> placeholder tokens of the video
    render_video: Callable[[ModelComponents, SampledVideo, int], str]
    # returns the text that the chat template renders for a video
    render_placeholder: Callable[[ModelComponents], str] = lambda components: components.video_token
    needs_frame_interval: bool = False  # whether the model requires the input second_per_grid_ts


@dataclass(frozen=True)
class VisionFamily:
    """Defines the module names and the image processing of a vision-language architecture.

    Modules whose names have none of these prefixes belong to the language model.
    """

    vision_prefix: str
    aligner_prefixes: tuple[str, ...]  # the aligner may be a submodule of the vision tower
    render_image: Callable[[ModelComponents, Size], str]  # returns the placeholder tokens of an image of this size
    # returns the text that the chat template renders for an image
    render_placeholder: Callable[[ModelComponents], str] = lambda components: components.image_token
    type_ids_input: str | None = None  # name of the model input that distinguishes image tokens
    packing_problem: str | None = None  # why the model does not isolate the rows of a pack; None if it does
    uses_mrope: bool = False  # whether image tokens have position ids in time, height and width
    has_dynamic_resolution: bool = False  # whether the number of image tokens depends on the image size
    splits_images_into_tiles: bool = False  # whether the number of image tokens depends on a limit of tiles
    video_support: VideoSupport | None = None
    processor_options: Mapping[str, Any] | None = None  # keyword arguments of the image processor
    # returns a regex for modules that get no gradients
    get_unused_modules: Callable[[PretrainedConfig], str | None] = lambda _config: None

    @property
    def supports_packing(self) -> bool:
        """Whether the model isolates the rows of a pack."""
        return self.packing_problem is None


def _render_qwen_image(components: ModelComponents, size: Size) -> str:
    patches = components.processor.get_number_of_image_patches(*size, {})
    return components.image_token * int(patches // components.processor.merge_size**2)


def _render_internvl_image(components: ModelComponents, size: Size) -> str:
    tiles = components.processor.get_number_of_image_patches(*size, {"crop_to_patches": True})
    start = getattr(components.tokenizer, "start_image_token", "<img>")
    end = getattr(components.tokenizer, "end_image_token", "</img>")
    return f"{start}{components.image_token * (tiles * components.config.image_seq_length)}{end}"


def _render_llava_image(components: ModelComponents, _size: Size) -> str:
    """Render a fixed number of image tokens, including CLIP's class token if the model keeps it."""
    vision = components.config.vision_config
    has_class_token = vision.model_type == "clip_vision_model"
    keeps_class_token = has_class_token and components.config.vision_feature_select_strategy == "full"
    return components.image_token * int((vision.image_size // vision.patch_size) ** 2 + keeps_class_token)


def _get_unused_llava_modules(config: PretrainedConfig) -> str:
    """Return a regex for the final norm of CLIP and the layers after `vision_feature_layer`, which LLaVA ignores."""
    layer_count, selected = config.vision_config.num_hidden_layers, config.vision_feature_layer
    selected_layers = [selected] if isinstance(selected, int) else selected
    last_used = max(layer if layer >= 0 else layer_count + 1 + layer for layer in selected_layers)
    unused_layers = "|".join(str(layer) for layer in range(last_used, layer_count))
    names = ["post_layernorm", *([rf"layers\.(?:{unused_layers})"] if unused_layers else [])]
    return rf"model\.vision_tower\.(?:.*\.)?(?:{'|'.join(names)})(?=\.|$)"


def _render_gemma3_image(components: ModelComponents, _size: Size) -> str:
    config = components.config
    start, end = (components.get_token_text(token_id) for token_id in (config.boi_token_index, config.eoi_token_index))
    return f"\n\n{start}{components.image_token * config.mm_tokens_per_image}{end}\n\n"


def _build_qwen_vl_family(video_support: VideoSupport, *aligner_prefixes: str) -> VisionFamily:
    return VisionFamily(
        "model.visual",
        aligner_prefixes,
        _render_qwen_image,
        type_ids_input="mm_token_type_ids",
        uses_mrope=True,
        has_dynamic_resolution=True,
        video_support=video_support,
    )


def _compute_frame_count(sampling: FrameSampling, total_frames: int, fps: float) -> float:
    return min(max(total_frames / fps * sampling.fps, sampling.min_frames), sampling.max_frames, total_frames)


def _choose_qwen2_frames(sampling: FrameSampling, total_frames: int, fps: float) -> tuple[int, ...]:
    """Divide the video into an even number of equal intervals, and choose the first frame of each interval."""
    count = max(int(_compute_frame_count(sampling, total_frames, fps)) // 2 * 2, 1)
    return tuple(index * total_frames // count for index in range(count))


def _resize_qwen2_frames(components: ModelComponents, sampling: FrameSampling, video: SampledVideo) -> Size:
    """Return the scaled height and width of the frames; the pixel limits apply to each frame."""
    factor = components.processor.patch_size * components.processor.merge_size
    limits = {"min_pixels": sampling.min_pixels, "max_pixels": sampling.max_pixels}
    height, width = resize_frame(*video.size, factor=factor, **limits)
    return int(height), int(width)


def _render_qwen2_video(components: ModelComponents, video: SampledVideo, tokens_per_frame_pair: int) -> str:
    return components.video_token * (len(video.timestamps) * tokens_per_frame_pair)


def _choose_qwen3_frames(sampling: FrameSampling, total_frames: int, fps: float) -> tuple[int, ...]:
    """Choose evenly spaced frames, including the first and the last."""
    count = max(int(_compute_frame_count(sampling, total_frames, fps)), 1)
    return tuple(int(index) for index in np.linspace(0, total_frames - 1, count).round())


def _resize_qwen3_frames(components: ModelComponents, sampling: FrameSampling, video: SampledVideo) -> Size:
    """Return the scaled height and width of the frames; the pixel limits apply to the sum of all frames."""
    height, width = resize_video(
        max(len(video.frame_indices), components.processor.temporal_patch_size),
        *video.size,
        temporal_factor=components.processor.temporal_patch_size,
        factor=components.processor.patch_size * components.processor.merge_size,
        min_pixels=sampling.min_pixels,
        max_pixels=sampling.max_pixels,
    )
    return int(height), int(width)


def _render_qwen3_video(components: ModelComponents, video: SampledVideo, tokens_per_frame_pair: int) -> str:
    """Render each pair of frames as a separate image, preceded by its timestamp."""
    start, end = (components.get_token_text(token_id) for token_id in _get_delimiter_ids(components.config))
    embeddings = f"{start}{components.video_token * tokens_per_frame_pair}{end}"
    return "".join(f"<{timestamp:.1f} seconds>{embeddings}" for timestamp in video.timestamps)


def _render_qwen3_placeholder(components: ModelComponents) -> str:
    start, end = (components.get_token_text(token_id) for token_id in _get_delimiter_ids(components.config))
    return f"{start}{components.video_token}{end}"


def _get_delimiter_ids(config: PretrainedConfig) -> tuple[int, int]:
    """Return the ids of the tokens before and after an image or video."""
    return config.vision_start_token_id, config.vision_end_token_id


_QWEN2_VIDEOS = VideoSupport(
    "Qwen2VLVideoProcessor",
    (128 * 28 * 28, 768 * 28 * 28),
    _choose_qwen2_frames,
    _resize_qwen2_frames,
    _render_qwen2_video,
)
_QWEN3_VIDEOS = VideoSupport(
    "Qwen3VLVideoProcessor",
    (4 * 32 * 32, 24_576 * 32 * 32),
    _choose_qwen3_frames,
    _resize_qwen3_frames,
    _render_qwen3_video,
    render_placeholder=_render_qwen3_placeholder,
)

_QWEN3_VL = _build_qwen_vl_family(_QWEN3_VIDEOS, "model.visual.merger", "model.visual.deepstack_merger_list")
_QWEN3_5 = replace(
    _build_qwen_vl_family(_QWEN3_VIDEOS, "model.visual.merger"),
    packing_problem="has linear attention layers, whose state carries over from one row of a pack to the next",
)
_TOWER_PREFIX, _PROJECTOR_PREFIXES = "model.vision_tower", ("model.multi_modal_projector",)

FAMILIES: dict[str, VisionFamily] = {  # key: model_type of the config
    "qwen2_vl": _build_qwen_vl_family(_QWEN2_VIDEOS, "model.visual.merger"),
    "qwen2_5_vl": _build_qwen_vl_family(replace(_QWEN2_VIDEOS, needs_frame_interval=True), "model.visual.merger"),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "internvl": VisionFamily(
        _TOWER_PREFIX,
        _PROJECTOR_PREFIXES,
        _render_internvl_image,
        splits_images_into_tiles=True,
        processor_options={"crop_to_patches": True},
    ),
    "llava": VisionFamily(
        _TOWER_PREFIX, _PROJECTOR_PREFIXES, _render_llava_image, get_unused_modules=_get_unused_llava_modules
    ),
    "gemma3": VisionFamily(
        _TOWER_PREFIX,
        _PROJECTOR_PREFIXES,
        _render_gemma3_image,
        render_placeholder=lambda components: components.get_token_text(components.config.boi_token_index),
        type_ids_input="token_type_ids",
        packing_problem="attends to image tokens in both directions, even across the rows of a pack",
    ),
}
