"""Defines the supported families of vision-language models: module names, placeholder text and media sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

from finetune_trainer.vision.video_frames import FrameChooser, SampledVideo, Sampling, Size


@dataclass(frozen=True)
class ModelHandles:
    """Config, image processor and tokenizer of a model, passed to the functions of its family."""

    config: PretrainedConfig
    processor: BaseImageProcessor
    tokenizer: PreTrainedTokenizerBase

    def get_token_text(self, token_id: int) -> str:
        """Return the text of a token."""
        return str(self.tokenizer.convert_ids_to_tokens(token_id))

    @property
    def image_token(self) -> str:
        """Placeholder token, which is replaced by one image embedding."""
        return self.get_token_text(self.config.image_token_id)

    @property
    def video_token(self) -> str:
        """Placeholder token, which is replaced by one video embedding."""
        return self.get_token_text(self.config.video_token_id)


@dataclass(frozen=True)
class VideoSupport:
    """Defines how a model family samples, scales and renders videos."""

    processor: str  # class name in transformers, saved in the settings of the result
    default_pixel_limits: tuple[int, int]  # (minimum, maximum) if the model's settings contain none
    choose_frames: FrameChooser
    resize: Callable[[ModelHandles, Sampling, SampledVideo], Size]
    render: Callable[[ModelHandles, SampledVideo, int], str]  # placeholder text; the int is the tokens per frame pair
    placeholder: Callable[[ModelHandles], str] = lambda model: model.video_token  # rendered by the template
    needs_frame_interval: bool = False  # the model input second_per_grid_ts is required


@dataclass(frozen=True)
class VisionFamily:
    """Module names and functions of a vision-language architecture.

    Prefixes refer to module names; modules with neither prefix belong to the language model.
    """

    vision_prefix: str
    aligner_prefixes: tuple[str, ...]  # may be inside the vision tower
    render: Callable[[ModelHandles, Size], str]  # placeholder text of an image of this size
    placeholder: Callable[[ModelHandles], str] = lambda model: model.image_token  # rendered by the template
    type_ids_input: str | None = None  # name of the model input that distinguishes image tokens
    supports_packing: bool = True  # attention isolates the rows of a pack, with or without images
    uses_mrope: bool = False  # image tokens have position ids in time, height and width
    has_dynamic_resolution: bool = False  # the number of tokens of an image grows with its pixels
    videos: VideoSupport | None = None
    processor_options: Mapping[str, Any] | None = None  # arguments of the image processor
    unused_modules: Callable[[PretrainedConfig], str | None] = lambda _config: None  # modules without gradients


def _render_qwen(model: ModelHandles, size: Size) -> str:
    patches = model.processor.get_number_of_image_patches(*size, {})
    return model.image_token * int(patches // model.processor.merge_size**2)


def _render_internvl(model: ModelHandles, size: Size) -> str:
    tiles = model.processor.get_number_of_image_patches(*size, {"crop_to_patches": True})
    start = getattr(model.tokenizer, "start_image_token", "<img>")
    end = getattr(model.tokenizer, "end_image_token", "</img>")
    return f"{start}{model.image_token * (tiles * model.config.image_seq_length)}{end}"


def _render_llava(model: ModelHandles, _size: Size) -> str:
    """Render a fixed number of tokens; the default feature selection drops the class token of CLIP."""
    vision = model.config.vision_config
    has_class_token = vision.model_type == "clip_vision_model"
    keeps_class_token = has_class_token and model.config.vision_feature_select_strategy == "full"
    return model.image_token * int((vision.image_size // vision.patch_size) ** 2 + keeps_class_token)


def _match_unused_llava_modules(config: PretrainedConfig) -> str:
    """Match CLIP's final norm and the layers after `vision_feature_layer`, whose output LLaVA does not use."""
    layer_count, selected = config.vision_config.num_hidden_layers, config.vision_feature_layer
    selected_layers = [selected] if isinstance(selected, int) else selected
    last_used = max(layer if layer >= 0 else layer_count + 1 + layer for layer in selected_layers)
    unused_layers = "|".join(str(layer) for layer in range(last_used, layer_count))
    names = ["post_layernorm", *([rf"layers\.(?:{unused_layers})"] if unused_layers else [])]
    return rf"model\.vision_tower\.(?:.*\.)?(?:{'|'.join(names)})(?=\.|$)"


def _render_gemma3(model: ModelHandles, _size: Size) -> str:
    config = model.config
    start, end = (model.get_token_text(token_id) for token_id in (config.boi_token_index, config.eoi_token_index))
    return f"\n\n{start}{model.image_token * config.mm_tokens_per_image}{end}\n\n"


def _build_qwen_vl_family(videos: VideoSupport, *aligner_prefixes: str) -> VisionFamily:
    return VisionFamily(
        "model.visual",
        aligner_prefixes,
        _render_qwen,
        type_ids_input="mm_token_type_ids",
        uses_mrope=True,
        has_dynamic_resolution=True,
        videos=videos,
    )


def _count_frames(sampling: Sampling, total_frames: int, fps: float) -> float:
    return min(max(total_frames / fps * sampling.fps, sampling.min_frames), sampling.max_frames, total_frames)


def _choose_qwen2_frames(sampling: Sampling, total_frames: int, fps: float) -> tuple[int, ...]:
    """Divide the video into an even number of equal intervals and choose the first frame of each."""
    count = max(int(_count_frames(sampling, total_frames, fps)) // 2 * 2, 1)
    return tuple(index * total_frames // count for index in range(count))


def _resize_qwen2_frames(model: ModelHandles, sampling: Sampling, video: SampledVideo) -> Size:
    """Return height and width; the pixel limits apply to each frame."""
    factor = model.processor.patch_size * model.processor.merge_size
    limits = {"min_pixels": sampling.min_pixels, "max_pixels": sampling.max_pixels}
    height, width = resize_frame(*video.size, factor=factor, **limits)
    return int(height), int(width)


def _render_qwen2_video(model: ModelHandles, video: SampledVideo, tokens_per_pair: int) -> str:
    return model.video_token * (len(video.timestamps) * tokens_per_pair)


def _choose_qwen3_frames(sampling: Sampling, total_frames: int, fps: float) -> tuple[int, ...]:
    """Choose evenly spaced frames, including the first and the last."""
    count = max(int(_count_frames(sampling, total_frames, fps)), 1)
    return tuple(int(index) for index in np.linspace(0, total_frames - 1, count).round())


def _resize_qwen3_frames(model: ModelHandles, sampling: Sampling, video: SampledVideo) -> Size:
    """Return height and width; the pixel limits apply to all frames together."""
    height, width = resize_video(
        max(len(video.frame_indices), model.processor.temporal_patch_size),
        *video.size,
        temporal_factor=model.processor.temporal_patch_size,
        factor=model.processor.patch_size * model.processor.merge_size,
        min_pixels=sampling.min_pixels,
        max_pixels=sampling.max_pixels,
    )
    return int(height), int(width)


def _render_qwen3_video(model: ModelHandles, video: SampledVideo, tokens_per_pair: int) -> str:
    """Render each pair of frames as a separate image, preceded by its timestamp."""
    start, end = (model.get_token_text(token_id) for token_id in _get_delimiter_ids(model.config))
    embeddings = f"{start}{model.video_token * tokens_per_pair}{end}"
    return "".join(f"<{timestamp:.1f} seconds>{embeddings}" for timestamp in video.timestamps)


def _render_qwen3_placeholder(model: ModelHandles) -> str:
    start, end = (model.get_token_text(token_id) for token_id in _get_delimiter_ids(model.config))
    return f"{start}{model.video_token}{end}"


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
    placeholder=_render_qwen3_placeholder,
)


_TOWER_PREFIX, _PROJECTOR_PREFIXES = "model.vision_tower", ("model.multi_modal_projector",)

FAMILIES: dict[str, VisionFamily] = {  # keyed by model_type of the config
    "qwen2_vl": _build_qwen_vl_family(_QWEN2_VIDEOS, "model.visual.merger"),
    "qwen2_5_vl": _build_qwen_vl_family(replace(_QWEN2_VIDEOS, needs_frame_interval=True), "model.visual.merger"),
    "qwen3_vl": _build_qwen_vl_family(_QWEN3_VIDEOS, "model.visual.merger", "model.visual.deepstack_merger_list"),
    "internvl": VisionFamily(
        _TOWER_PREFIX, _PROJECTOR_PREFIXES, _render_internvl, processor_options={"crop_to_patches": True}
    ),
    "llava": VisionFamily(
        _TOWER_PREFIX, _PROJECTOR_PREFIXES, _render_llava, unused_modules=_match_unused_llava_modules
    ),
    "gemma3": VisionFamily(
        _TOWER_PREFIX,
        _PROJECTOR_PREFIXES,
        _render_gemma3,
        placeholder=lambda model: model.get_token_text(model.config.boi_token_index),
        type_ids_input="token_type_ids",
        supports_packing=False,
    ),
}
