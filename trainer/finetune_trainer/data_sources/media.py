"""Finds the images and videos of a row and their positions in the text of the row.

Supports OpenAI content parts, and `<image>` tags with a column `images`.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from finetune_trainer.data_sources.readers import Row, describe_value
from finetune_trainer.errors import DatasetError


class Modality(StrEnum):
    """Input modality of a vision-language model, besides text."""

    IMAGE = "image"
    VIDEO = "video"

    @property
    def tag(self) -> str:
        """Tag in the text of a row that refers to the next entry of the media column."""
        return f"<{self}>"

    @property
    def columns(self) -> tuple[str, ...]:
        """Supported column names for this modality."""
        return (f"{self}s", str(self))

    @property
    def content_part_keys(self) -> tuple[str, ...]:
        """Keys of a content part that may contain the image or video."""
        return (str(self), "path", "url", f"{self}_url", "bytes")


MEDIA_MARK = (
    "\ufffc\ue0f0"  # marks the position of an image or video in the text of a turn; does not occur in real text
)


@dataclass(frozen=True)
class MediaItem:
    """Image or video: the path or the bytes of a file, or the frame paths of a video.

    checksum: of the files at these paths when the row was tokenized; empty if it was not computed.
    """

    path: str = ""
    data: bytes = b""
    modality: Modality = Modality.IMAGE
    frames: tuple[str, ...] = ()
    checksum: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files; empty if the row contains the file."""
        return self.frames or ((self.path,) if self.path else ())

    def __str__(self) -> str:
        """Return the modality and the path for error messages."""
        return f"{self.modality} {self.path or (self.frames[0] if self.frames else 'in the row')}"


def parse_content_part_media(row: Row, location: str, part: dict[str, object], modality: Modality) -> MediaItem | None:
    """Return the image or video of a content part, or None if the part refers to the media column.

    location: position of the part in the row, for error messages.
    """
    keys = [key for key in modality.content_part_keys if part.get(key) is not None]
    return _parse_media(row, f"{location}.{keys[0]}", part[keys[0]], modality) if keys else None


def parse_media_columns(row: Row, modality: Modality) -> tuple[MediaItem, ...]:
    """Return the images or videos in the media column of the row, or an empty tuple if there is no such column."""
    for name in modality.columns:
        value = row.columns.get(name)
        if value is not None and value != "":
            entries = value if isinstance(value, list) else [value]
            return tuple(
                _parse_media(row, f"{row.origin}, column {name}[{index}]", entry, modality)
                for index, entry in enumerate(entries)
            )
    return ()


def assign_media(
    row: Row, contents: Sequence[str], part_media: Sequence[tuple[MediaItem, ...]]
) -> tuple[tuple[str, tuple[MediaItem, ...]], ...]:
    """Return the text and the media of each turn; MEDIA_MARK replaces each image or video in the text.

    part_media: images and videos in the content parts of each turn.
    Without a media column, `<image>` and `<video>` are plain text.
    Raises: DatasetError if the numbers of tags and column entries differ.
    """
    column_media: dict[str, Iterator[MediaItem]] = {}
    for modality in Modality:
        column_items = parse_media_columns(row, modality)
        tags = sum(content.count(modality.tag) for content in contents)
        if column_items and tags != len(column_items):
            raise DatasetError(
                f"{row.origin}: {tags} x {modality.tag} in the messages, but {len(column_items)} in the column of"
                f" {modality}s; write {modality.tag} once for each {modality}, at its position in the text"
            )
        if column_items:
            column_media[modality.tag] = iter(column_items)
    return tuple(
        _replace_tags(content, iter(items), column_media) for content, items in zip(contents, part_media, strict=True)
    )


def _replace_tags(
    content: str, part_media: Iterator[MediaItem], column_media: Mapping[str, Iterator[MediaItem]]
) -> tuple[str, tuple[MediaItem, ...]]:
    marks_and_tags = re.findall("|".join(map(re.escape, (MEDIA_MARK, *column_media))), content)
    for tag in column_media:
        content = content.replace(tag, MEDIA_MARK)
    return content, tuple(next(part_media if tag == MEDIA_MARK else column_media[tag]) for tag in marks_and_tags)


def _parse_media(row: Row, location: str, value: object, modality: Modality) -> MediaItem:
    # OpenAI format: {"url": ...}; format of the datasets library: {"bytes": ..., "path": ...}
    if isinstance(value, dict):
        for key in ("url", "bytes", "path"):
            if value.get(key):
                return _parse_media(row, f"{location}.{key}", value[key], modality)
    if modality is Modality.VIDEO and isinstance(value, list) and value:
        frames = [_parse_media(row, f"{location}[{index}]", frame, Modality.IMAGE) for index, frame in enumerate(value)]
        if all(frame.path for frame in frames):
            return MediaItem(modality=modality, frames=tuple(frame.path for frame in frames))
    if isinstance(value, bytes) and value:
        return MediaItem(data=value, modality=modality)
    if not isinstance(value, str) or not value:
        is_image = modality is Modality.IMAGE
        expected = "the path or the bytes of an image" if is_image else "the path of a video or of each of its frames"
        raise DatasetError(f"{location}: expected {expected}, found {describe_value(value)}")
    if value.startswith("data:"):
        return MediaItem(data=_decode_data_url(location, value, modality), modality=modality)
    if value.startswith(("http://", "https://")):
        raise DatasetError(
            f"{location}: {value[:200]} is on the network, where each epoch would fetch it again; store it beside the"
            " rows and specify its path"
        )
    return MediaItem(path=str(row.folder / Path(value.removeprefix("file://"))), modality=modality)


def _decode_data_url(location: str, url: str, modality: Modality) -> bytes:
    header, _, body = url.partition(",")
    try:
        if header.endswith(";base64"):
            return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise DatasetError(f"{location}: expected the {modality} as base64, found invalid base64 ({error})") from error
    raise DatasetError(f"{location}: expected data:{modality}/...;base64,..., found {describe_value(header)}")
