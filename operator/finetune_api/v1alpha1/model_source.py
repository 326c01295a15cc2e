"""The model that is trained, and how its images and videos are read."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from finetune_api.v1alpha1.base import Model, NonEmpty, validations

_PIXELS_RULE = "!(has(self.minPixels) && has(self.maxPixels)) || self.minPixels <= self.maxPixels"
_PIXELS_MESSAGE = "minPixels is more than maxPixels; images cannot have both"


class ModelSource(Model):
    """The model to start from."""

    name: NonEmpty = Field(description="A Hub id such as Qwen/Qwen2.5-7B-Instruct, or a path on a mounted volume.")
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Data type of the weights; auto takes what the checkpoint's config says."
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="How attention is computed; auto takes the fastest of what is installed for the GPU, else sdpa.",
    )
    max_pixels: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Pixels of an image above which it is made smaller, of models with images of any size;"
        " Qwen2-VL makes one token of 784 pixels. Default: what the model's processor says.",
    )
    min_pixels: int | None = Field(
        default=None, ge=1, le=1_000_000_000, description="Pixels of an image below which it is made larger."
    )
    video_fps: float | None = Field(
        default=None,
        gt=0,
        le=60,
        description="Frames that are taken of a second of a video. Default: what the model's processor says, else 2.",
    )
    video_max_frames: int | None = Field(
        default=None, ge=1, le=10_000, description="Most frames that are taken of a video. Default: likewise, else 768."
    )
    video_max_pixels: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Pixels above which videos are made smaller: those of a frame for Qwen2-VL and Qwen2.5-VL, of all"
        " frames together for Qwen3-VL. Default: what the model's processor says.",
    )
    freeze: tuple[Literal["vision", "aligner", "language"], ...] | None = Field(
        default=None,
        max_length=2,
        description="Parts of a vision-language model that are not trained (default: vision and aligner).",
    )

    model_config = ConfigDict(json_schema_extra=validations((_PIXELS_RULE, _PIXELS_MESSAGE)))

    @model_validator(mode="after")
    def _pixels_are_a_range(self) -> Self:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(_PIXELS_MESSAGE)
        return self
