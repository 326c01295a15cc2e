"""From a video to its frames: which of them are looked at, when they are shown, and how large they are made."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from finetune_trainer.data_sources.media import Picture
from finetune_trainer.errors import DatasetError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame

Size = tuple[int, int]  # height, width

_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)  # of EXIF: height and width are swapped
_JOINED = 2  # frames that become one in time, in every model that sees videos


@dataclass(frozen=True)
class Sampling:
    """How closely videos are looked at."""

    fps: float  # frames that are taken of a second
    min_frames: int
    max_frames: int
    min_pixels: int  # of a frame or of all together, as the family counts
    max_pixels: int


@dataclass(frozen=True)
class Film:
    """The frames of a video that are looked at."""

    numbers: tuple[int, ...]  # from 0, as they lie in the file
    total: int
    fps: float  # of the file
    size: Size  # of a frame, upright

    @property
    def sampled_fps(self) -> float:
        return len(self.numbers) / self.total * self.fps

    @property
    def moments(self) -> tuple[float, ...]:
        """Seconds from the beginning, of each two frames their middle; a last one alone is shown twice."""
        last_again = self.numbers[-1:] * (len(self.numbers) % _JOINED)
        shown = [number / self.fps for number in (*self.numbers, *last_again)]
        return tuple((first + second) / 2 for first, second in zip(shown[::2], shown[1::2], strict=True))


Choose = Callable[[Sampling, int, float], tuple[int, ...]]  # of so many frames at so many a second, by number


def survey(video: Picture, sampling: Sampling, choose: Choose) -> Film:
    """Reads no more than the first frame, unless the file does not say how many there are."""
    if video.frames:
        numbers = choose(sampling, len(video.frames), sampling.fps)
        return Film(numbers, len(video.frames), sampling.fps, upright_size(video.frames[0]))
    with _opened(video) as container:
        stream = container.streams.video[0]
        fps = float(stream.average_rate or stream.guessed_rate or Fraction(24))
        total = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        if not stream.frames:
            container.seek(0)
        first_frame = next(container.decode(stream), None)
        if first_frame is None or not total:
            raise DatasetError("it has no frames")
        upright = _upright(first_frame)
        return Film(choose(sampling, total, fps), total, fps, (upright.height, upright.width))


def frames(video: Picture, film: Film) -> list[Image.Image]:
    """In colour and upright. Where the file ends before it says, its last frame stands for the rest."""
    if video.frames:
        return [open_upright(video.frames[number]) for number in film.numbers]
    wanted, found = set(film.numbers), dict[int, Image.Image]()
    with _opened(video) as container:
        for number, frame in enumerate(container.decode(container.streams.video[0])):
            if number in wanted:
                found[number] = last = _upright(frame)
            if number == film.numbers[-1]:
                break
    if not found:
        raise DatasetError("it has no frames")
    return [found.get(number, last) for number in film.numbers]


def upright_size(source: str | io.BytesIO) -> Size:
    """Of an image, as the camera was held. Reads its header only."""
    with Image.open(source) as image:
        width, height = image.size
        return (width, height) if image.getexif().get(_ORIENTATION) in _LYING else (height, width)


def open_upright(source: str | io.BytesIO) -> Image.Image:
    """An image in colour, as the camera was held."""
    with Image.open(source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _opened(video: Picture) -> Iterator["InputContainer"]:
    import av  # a tenth of a second, which jobs without videos need not wait

    try:
        with av.open(io.BytesIO(video.data) if video.data else video.path, mode="r") as container:
            if not container.streams.video:
                raise DatasetError("it holds no pictures")
            container.streams.video[0].thread_type = "AUTO"
            yield container
    except av.error.FFmpegError as error:
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            raise
        raise DatasetError(str(error)) from error


def _upright(frame: "VideoFrame") -> Image.Image:
    """A telephone that is held upright writes lying frames, and by how much they are turned."""
    image: Image.Image = frame.to_image()  # type: ignore[no-untyped-call]
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
