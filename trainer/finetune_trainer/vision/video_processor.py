"""Videos as a model takes them: their text, and the patches of each two frames, made by the processor of images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.utils import cached_file

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data_sources.media import Picture
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import Family, Seen, Videos
from finetune_trainer.vision.video_frames import Film, Sampling, Size, frames, survey

Features = dict[str, torch.Tensor]

OF_VIDEOS = ("videoFps", "videoMaxFrames", "videoMaxPixels")  # fields of spec.model
DESCRIBED = "video_preprocessor_config.json"
FILM = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
_FPS, _MIN_FRAMES, _MAX_FRAMES = 2.0, 4, 768  # of qwen-vl-utils and ms-swift


@dataclass(frozen=True)
class VideoEye:
    """How a model sees videos."""

    videos: Videos
    seen: Seen
    sampling: Sampling

    @property
    def placeholder(self) -> str:
        return self.videos.placeholder(self.seen)

    def write(self, video: Picture) -> str:
        """What stands for it in the text."""
        return self._write(survey(video, self.sampling, self.videos.choose))

    def pixels(self, video: Picture) -> Features:
        film = survey(video, self.sampling, self.videos.choose)
        return self._pixels(film, frames(video, film))

    def blank(self, edge: int) -> tuple[str, Features]:
        """Text and pixels of two frames that show nothing."""
        film = Film((0, 1), total=2, fps=self.sampling.fps, size=(edge, edge))
        return self._write(film), self._pixels(film, [Image.new("RGB", (edge, edge), (128, 128, 128))] * 2)

    def _size(self, film: Film) -> Size:
        return self.videos.resize(self.seen, self.sampling, film)

    def _write(self, film: Film) -> str:
        height, width = self._size(film)
        edge = self.seen.processor.patch_size * self.seen.processor.merge_size
        return self.videos.write(self.seen, film, (height // edge) * (width // edge))

    def _pixels(self, film: Film, shown: list[Image.Image]) -> Features:
        """The processor gives of a frame the patches of a video that stands still: (patches, all of a patch).

        In each of them a frame's pixels are there once for every frame that a patch joins; of the others' ours are put
        in their place.
        """
        height, width = self._size(film)
        processor, joined = self.seen.processor, int(self.seen.processor.temporal_patch_size)
        shown = [*shown, *shown[-1:] * (-len(shown) % joined)]
        scaled = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in shown]
        still = processor(scaled, do_resize=False, return_tensors="pt")["pixel_values"]
        each = still.view(len(scaled) // joined, joined, -1, 3, joined, int(processor.patch_size) ** 2)
        moving = torch.stack([each[:, number, :, :, number] for number in range(joined)], dim=3)
        grid = (len(scaled) // joined, height // processor.patch_size, width // processor.patch_size)
        pixels = moving.reshape(-1, still.shape[-1])
        found = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
        if self.videos.timed:
            found["second_per_grid_ts"] = torch.tensor([joined / film.sampled_fps])
        return found


def describe_videos(source: ModelSource, family: Family, seen: Seen) -> VideoEye | None:
    """None for a family that sees images only. Raises InvalidSpec where the spec asks such a model for videos."""
    if family.videos is None:
        asked = [name for name in OF_VIDEOS if name in source.model_dump(by_alias=True, exclude_none=True)]
        if asked:
            raise InvalidSpec(
                f'spec.model.{asked[0]}: model "{source.name}" is not trained on videos here; leave it out'
            )
        return None
    found = read_settings(source.name)
    size = found.get("size") or {}
    least, most = family.videos.pixels
    sampling = Sampling(
        fps=source.video_fps or found.get("fps") or _FPS,
        min_frames=found.get("min_frames") or _MIN_FRAMES,
        max_frames=source.video_max_frames or found.get("max_frames") or _MAX_FRAMES,
        min_pixels=size.get("shortest_edge") or found.get("min_pixels") or least,
        max_pixels=source.video_max_pixels or size.get("longest_edge") or found.get("max_pixels") or most,
    )
    if sampling.min_pixels > sampling.max_pixels:
        raise InvalidSpec(
            f"spec.model.videoMaxPixels: {sampling.max_pixels} is less than the {sampling.min_pixels} to which the"
            f' processor of model "{source.name}" makes videos larger; raise it'
        )
    return VideoEye(family.videos, seen, sampling)


def read_settings(model_name: str) -> dict[str, Any]:
    """What the model's own processor of videos is set to; nothing where it has none of its own."""
    return _read(model_name, DESCRIBED) or _read(model_name, "processor_config.json").get("video_processor") or {}


def _read(model_name: str, name: str) -> dict[str, Any]:
    path = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return found


def settings_of(eye: VideoEye, model_name: str) -> dict[str, object]:
    """Those with which videos were trained on, for serving."""
    processor, sampling = eye.seen.processor, eye.sampling
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")
    return {
        "video_processor_type": eye.videos.processor,
        **{name: getattr(processor, name) for name in names},
        **read_settings(model_name),
        "size": {"shortest_edge": sampling.min_pixels, "longest_edge": sampling.max_pixels},
        "fps": sampling.fps,
        "min_frames": sampling.min_frames,
        "max_frames": sampling.max_frames,
        "do_sample_frames": True,
    }
