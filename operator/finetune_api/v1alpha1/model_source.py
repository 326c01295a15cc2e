"""Defines spec.model: the model to train, and the processing of its images and videos."""

from typing import ClassVar, Literal

from pydantic import Field

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, HubName, ModelWithRules, NonEmpty
from finetune_api.v1alpha1.name_types import Revision
from finetune_supervisor.contract import to_camel

_VISION_FIELDS = (
    "freeze",
    "max_pixels",
    "min_pixels",
    "max_tiles",
    "video_fps",
    "video_max_frames",
    "video_max_pixels",
)


def _find_vision_fields_of_text_training(model: "ModelSource") -> str | None:
    fields = [to_camel(name) for name in _VISION_FIELDS if getattr(model, name) is not None]
    if not model.text_only or not fields:
        return None
    return f"textOnly trains no images and videos; remove {', '.join(fields)}"


class ModelSource(ModelWithRules):
    """The model to fine-tune, and the processing of its images and videos."""

    name: NonEmpty = Field(description="A Hub id such as Qwen/Qwen2.5-7B-Instruct, or a path on a mounted volume.")
    hub: HubName = Field(
        default="huggingface",
        description="Hub of an id: the Hugging Face Hub, with HF_TOKEN, or ModelScope, with MODELSCOPE_API_TOKEN.",
    )
    revision: Revision | None = Field(
        default=None,
        description="Branch, tag or commit of a model on the Hub. The first attempt resolves it to a commit, which"
        " later attempts use (default: the main branch).",
    )
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Data type of the weights; auto uses the one in the model's config."
    )
    attn_implementation: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="Attention implementation; varlen computes no padding. auto uses varlen if the model supports it,"
        " otherwise the fastest one installed for the GPU, sdpa, or eager if the model has no sdpa.",
    )
    text_only: bool = Field(
        default=False,
        description="Train only the text part of a model with a vision, audio or speech part, on rows without media."
        " The result contains the other parts unchanged.",
    )
    max_pixels: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Largest number of pixels of an image; larger ones are downscaled. For models with dynamic"
        " resolution; Qwen2-VL uses one token per 784 pixels. Default: that of the model's processor.",
    )
    min_pixels: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Smallest number of pixels of an image; smaller ones are upscaled. Default: that of the model's"
        " processor.",
    )
    max_tiles: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Largest number of tiles into which InternVL divides an image, besides a thumbnail of the image."
        " Default: that of the model's processor, usually 12.",
    )
    video_fps: float | None = Field(
        default=None,
        gt=0,
        le=60,
        description="Sampled frames per second of video. Default: that of the model's processor, otherwise 2.",
    )
    video_max_frames: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Maximum number of frames per video. Default: that of the model's processor, otherwise 768.",
    )
    video_max_pixels: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Largest number of pixels of a video; larger ones are downscaled. Counted per frame for Qwen2-VL"
        " and Qwen2.5-VL, and over all frames for Qwen3-VL. Default: that of the model's processor.",
    )
    freeze: tuple[Literal["vision", "aligner", "language"], ...] | None = Field(
        default=None,
        max_length=2,
        description="Frozen parts of a vision-language model (default: vision and aligner).",
    )

    rules: ClassVar[tuple[CrossFieldRule["ModelSource"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "a path has no revision",
            lambda model: model.revision is not None and model.name.startswith(("/", ".")),
            CelRule(
                "!(has(self.revision) && (self.name.startsWith('/') || self.name.startsWith('.')))",
                "revision: name is a path, and only a model on the Hub has revisions; remove revision",
            ),
            cel_limitations="a relative path that begins with neither / nor .; the trainer rejects its revision",
        ),
        CrossFieldRule.from_cel_rule(
            "pixels are a range",
            lambda model: (
                model.min_pixels is not None and model.max_pixels is not None and model.min_pixels > model.max_pixels
            ),
            CelRule(
                "!(has(self.minPixels) && has(self.maxPixels)) || self.minPixels <= self.maxPixels",
                "minPixels is more than maxPixels; lower minPixels or raise maxPixels",
            ),
        ),
        CrossFieldRule(
            "text training has no vision fields",
            _find_vision_fields_of_text_training,
            (
                CelRule(
                    "!(has(self.textOnly) && self.textOnly) ||"
                    f" !({' || '.join(f'has(self.{to_camel(name)})' for name in _VISION_FIELDS)})",
                    f"textOnly trains no images and videos; remove {', '.join(map(to_camel, _VISION_FIELDS))}",
                ),
            ),
        ),
    )
