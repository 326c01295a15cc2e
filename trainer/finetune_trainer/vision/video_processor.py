"""Renders videos as placeholder tokens and converts their frames to patches with the model's image processor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.utils import cached_file

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data_sources.media import MediaItem
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import ModelComponents, VideoSupport, VisionFamily
from finetune_trainer.vision.video_frames import FrameSampling, SampledVideo, Size, decode_frames, probe_video

Features = dict[str, torch.Tensor]

VIDEO_FIELDS = ("videoFps", "videoMaxFrames", "videoMaxPixels")  # video fields of spec.model
VIDEO_SETTINGS_FILE = "video_preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
VIDEO_INPUTS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
_FPS, _MIN_FRAMES, _MAX_FRAMES = 2.0, 4, 768  # the defaults of qwen-vl-utils and ms-swift


@dataclass(frozen=True)
class VideoProcessor:
    """Renders placeholder tokens and computes pixel inputs for the videos of one model."""

    video_support: VideoSupport
    components: ModelComponents
    sampling: FrameSampling

    @property
    def placeholder(self) -> str:
        """Text that the chat template renders for a video."""
        return self.video_support.render_placeholder(self.components)

    def render(self, video: MediaItem) -> str:
        """Return the placeholder tokens of the video as text."""
        return self._render(probe_video(video, self.sampling, self.video_support.choose_frames))

    def load_pixels(self, video: MediaItem) -> Features:
        """Return the pixel inputs of the video."""
        sampled_video = probe_video(video, self.sampling, self.video_support.choose_frames)
        return self._compute_pixels(sampled_video, decode_frames(video, sampled_video))

    def build_dummy(self, edge_length: int) -> tuple[str, Features]:
        """Build placeholder tokens and pixel inputs of a video with two gray frames.

        edge_length: height and width of the frames in pixels.
        """
        sampled_video = SampledVideo((0, 1), total_frames=2, fps=self.sampling.fps, size=(edge_length, edge_length))
        frames = [Image.new("RGB", (edge_length, edge_length), (128, 128, 128))] * 2
        return self._render(sampled_video), self._compute_pixels(sampled_video, frames)

    def _compute_scaled_size(self, video: SampledVideo) -> Size:
        return self.video_support.resize(self.components, self.sampling, video)

    def _render(self, video: SampledVideo) -> str:
        height, width = self._compute_scaled_size(video)
        edge = self.components.processor.patch_size * self.components.processor.merge_size
        return self.video_support.render_video(self.components, video, (height // edge) * (width // edge))

    def _compute_pixels(self, video: SampledVideo, frames: list[Image.Image]) -> Features:
        """Return the pixel inputs; pixel_values_videos is (patches, values per patch) (decisions/603).

        A patch contains pixels of several consecutive frames. The image processor fills a patch with copies of one
        frame, so this method replaces the copies with the pixels of the following frames.
        """
        height, width = self._compute_scaled_size(video)
        processor, joined = self.components.processor, int(self.components.processor.temporal_patch_size)
        frames = [*frames, *frames[-1:] * (-len(frames) % joined)]
        scaled = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
        still = processor(scaled, do_resize=False, return_tensors="pt")["pixel_values"]
        per_frame = still.view(len(scaled) // joined, joined, -1, 3, joined, int(processor.patch_size) ** 2)
        moving = torch.stack([per_frame[:, index, :, :, index] for index in range(joined)], dim=3)
        grid = (len(scaled) // joined, height // processor.patch_size, width // processor.patch_size)
        pixels = moving.reshape(-1, still.shape[-1])
        inputs = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
        if self.video_support.needs_frame_interval:
            inputs["second_per_grid_ts"] = torch.tensor([joined / video.sampled_fps])
        return inputs


def build_video_processor(
    source: ModelSource, family: VisionFamily, components: ModelComponents, local: ModelSource
) -> VideoProcessor | None:
    """Build the video processor of a model; return None if its family does not support videos.

    Settings in the spec override settings of the model, which override the defaults.
    Raises: InvalidSpec if the spec has fields that the model does not support.
    """
    if family.video_support is None:
        specified = [name for name in VIDEO_FIELDS if name in source.model_dump(by_alias=True, exclude_none=True)]
        if specified:
            raise InvalidSpec(
                f'spec.model.{specified[0]}: model "{source.name}" is not trained on videos here; leave it out'
            )
        return None
    settings = read_video_settings(local.name, local.revision)
    size = settings.get("size") or {}
    default_min, default_max = family.video_support.default_pixel_limits
    sampling = FrameSampling(
        fps=source.video_fps or settings.get("fps") or _FPS,
        min_frames=settings.get("min_frames") or _MIN_FRAMES,
        max_frames=source.video_max_frames or settings.get("max_frames") or _MAX_FRAMES,
        min_pixels=size.get("shortest_edge") or settings.get("min_pixels") or default_min,
        max_pixels=source.video_max_pixels or size.get("longest_edge") or settings.get("max_pixels") or default_max,
    )
    if sampling.min_pixels > sampling.max_pixels:
        raise InvalidSpec(
            f"spec.model.videoMaxPixels: {sampling.max_pixels} is less than the {sampling.min_pixels} to which the"
            f' processor of model "{source.name}" scales smaller videos up; raise it'
        )
    return VideoProcessor(family.video_support, components, sampling)


def read_video_settings(model_name: str, revision: str | None) -> dict[str, Any]:
    """Return the video settings of a model, or an empty dict if the model has none."""
    settings = _read_json(model_name, revision, VIDEO_SETTINGS_FILE)
    return settings or _read_json(model_name, revision, PROCESSOR_FILE).get("video_processor") or {}


def _read_json(model_name: str, revision: str | None, file_name: str) -> dict[str, Any]:
    path = find_model_file(model_name, revision, file_name)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path else {}
    return content


def find_model_file(model_name: str, revision: str | None, file_name: str) -> Path | None:
    """Return the path of a model file, or None if it does not exist. Downloads the file if necessary."""
    path = cached_file(model_name, file_name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None


def export_video_settings(processor: VideoProcessor, model_name: str, revision: str | None) -> dict[str, object]:
    """Return the video settings used in training in the format of transformers, so that serving uses them too."""
    image_processor, sampling = processor.components.processor, processor.sampling
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")
    return {
        "video_processor_type": processor.video_support.processor_class,
        **{name: getattr(image_processor, name) for name in names},
        **read_video_settings(model_name, revision),
        "size": {"shortest_edge": sampling.min_pixels, "longest_edge": sampling.max_pixels},
        "fps": sampling.fps,
        "min_frames": sampling.min_frames,
        "max_frames": sampling.max_frames,
        "do_sample_frames": True,
    }
