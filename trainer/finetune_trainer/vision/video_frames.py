"""Samples and decodes the frames of videos."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from finetune_trainer.data_sources.media import MediaItem
from finetune_trainer.errors import DatasetError
from finetune_trainer.foreign_files import open_data_file

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame

Size = tuple[int, int]  # height and width in pixels

_EXIF_ORIENTATION = 0x0112
_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_FRAMES_PER_GROUP = 2  # all supported families merge two consecutive frames
# Containers that ffmpeg may recognise. Others, such as SDP, HLS and concat, open further files and connections.
_CONTAINERS = "mov,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif,apng,m4v,mpegvideo,h264,hevc,ivf,wav"
_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}


@dataclass(frozen=True)
class FrameSampling:
    """Frame rate and limits of frame count and size for sampling video frames."""

    fps: float  # sampled frames per second
    min_frames: int
    max_frames: int
    min_pixels: int  # pixel limits apply per frame or per video, depending on the family
    max_pixels: int


@dataclass(frozen=True)
class SampledVideo:
    """Indices of the sampled frames, and properties of the video."""

    frame_indices: tuple[int, ...]
    total_frames: int  # number of frames in the file
    fps: float  # frame rate of the file
    size: Size  # size of a frame after rotation

    @property
    def sampled_fps(self) -> float:
        """Average number of sampled frames per second."""
        return len(self.frame_indices) / self.total_frames * self.fps

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Mean time of each pair of frames, in seconds; an unpaired last frame is paired with itself."""
        padding = self.frame_indices[-1:] * (len(self.frame_indices) % _FRAMES_PER_GROUP)
        seconds = [index / self.fps for index in (*self.frame_indices, *padding)]
        return tuple((first + second) / 2 for first, second in zip(seconds[::2], seconds[1::2], strict=True))


# signature: (sampling, total frames, fps) -> frame indices
FrameChooser = Callable[[FrameSampling, int, float], tuple[int, ...]]


def probe_video(video: MediaItem, sampling: FrameSampling, choose_frames: FrameChooser) -> SampledVideo:
    """Read the properties of a video and choose the frames to sample.

    Decodes only the first frame. Reads all packets if the header has no frame count.

    Raises: DatasetError if the file is not a video.
    """
    if video.frames:
        indices = choose_frames(sampling, len(video.frames), sampling.fps)
        return SampledVideo(indices, len(video.frames), sampling.fps, read_upright_size(video.frames[0]))
    with _open_video(video) as container:
        stream = container.streams.video[0]
        fps = float(stream.average_rate or stream.guessed_rate or Fraction(24))
        total_frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        if not stream.frames:
            container.seek(0)
        first_frame = next(container.decode(stream), None)
        if first_frame is None or not total_frames:
            raise DatasetError("it has no frames")
        upright = _to_upright_image(first_frame)
        return SampledVideo(
            choose_frames(sampling, total_frames, fps), total_frames, fps, (upright.height, upright.width)
        )


def decode_frames(video: MediaItem, sampled_video: SampledVideo) -> list[Image.Image]:
    """Decode the sampled frames to upright RGB images.

    If the file ends early, the last decoded frame replaces the missing frames.
    Raises: DatasetError if no sampled frame can be decoded.
    """
    if video.frames:
        return [open_upright_image(video.frames[index]) for index in sampled_video.frame_indices]
    indices, decoded = set(sampled_video.frame_indices), dict[int, Image.Image]()
    with _open_video(video) as container:
        for index, frame in enumerate(container.decode(container.streams.video[0])):
            if index in indices:
                decoded[index] = last = _to_upright_image(frame)
            if index == sampled_video.frame_indices[-1]:
                break
    if not decoded:
        raise DatasetError("it has no frames")
    return [decoded.get(index, last) for index in sampled_video.frame_indices]


def read_upright_size(source: str | io.BytesIO) -> Size:
    """Read the size of an image from its header and apply the EXIF orientation."""
    with _open_image(source) as image:
        width, height = image.size
        is_rotated = image.getexif().get(_EXIF_ORIENTATION) in _QUARTER_TURNS
        return (width, height) if is_rotated else (height, width)


def open_upright_image(source: str | io.BytesIO) -> Image.Image:
    """Open an image as RGB and apply its EXIF orientation."""
    with _open_image(source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _open_image(source: str | io.BytesIO) -> Iterator[Image.Image]:
    with open_data_file(source) if isinstance(source, str) else source as file, Image.open(file) as image:
        if image.format == "EPS":
            raise DatasetError("EPS is not supported, because Ghostscript would decode it")
        yield image


@contextmanager
def _open_video(video: MediaItem) -> Iterator["InputContainer"]:
    # Import lazily: the import takes 0.1 s, and most jobs have no videos.
    import av

    try:
        source = io.BytesIO(video.data) if video.data else open_data_file(video.path)
        with source, av.open(source, mode="r", options=_OPTIONS) as container:
            if not container.streams.video:
                raise DatasetError("it contains no video stream")
            container.streams.video[0].thread_type = "AUTO"
            yield container
    except av.error.FFmpegError as error:
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            raise
        raise DatasetError(str(error)) from error


def _to_upright_image(frame: "VideoFrame") -> Image.Image:
    """Convert a frame to an image and apply its rotation; phones store upright videos as rotated frames."""
    image: Image.Image = frame.to_image()  # type: ignore[no-untyped-call]
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
