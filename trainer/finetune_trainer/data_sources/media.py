"""Which images and videos a row shows, and where in its words: OpenAI's parts, or `<image>` with a column `images`."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from finetune_trainer.data_sources.readers import Row, describe
from finetune_trainer.errors import DatasetError


class Kind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"

    @property
    def tag(self) -> str:
        """In the words of a row, for the next entry of its column."""
        return f"<{self}>"

    @property
    def columns(self) -> tuple[str, ...]:
        return (f"{self}s", str(self))

    @property
    def part_keys(self) -> tuple[str, ...]:
        """Of a part of a message, for what it shows."""
        return (str(self), "path", "url", f"{self}_url", "bytes")


MARK = "\ufffc\ue0f0"  # in ours, for the next of a turn's pictures; two characters that no text has together


@dataclass(frozen=True)
class Picture:
    """An image or a video by its path, or itself as a file's bytes; or a video by the paths of its frames."""

    path: str = ""
    data: bytes = b""
    kind: Kind = Kind.IMAGE
    frames: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As a message names it."""
        return f"{self.kind} {self.path or (self.frames[0] if self.frames else 'in the row')}"


def part_picture(row: Row, where: str, part: dict[str, object], kind: Kind) -> Picture | None:
    """What a part of a message shows; None if it only says that the next entry of the column is shown here."""
    named = [key for key in kind.part_keys if part.get(key) is not None]
    return _picture(row, f"{where}.{named[0]}", part[named[0]], kind) if named else None


def column_pictures(row: Row, kind: Kind) -> tuple[Picture, ...]:
    """Those of the row's column, in its order; none if it has no such column."""
    for name in kind.columns:
        value = row.columns.get(name)
        if value is not None and value != "":
            entries = value if isinstance(value, list) else [value]
            return tuple(
                _picture(row, f"{row.place}, column {name}[{index}]", entry, kind)
                for index, entry in enumerate(entries)
            )
    return ()


def place_pictures(
    row: Row, contents: Sequence[str], own: Sequence[tuple[Picture, ...]]
) -> tuple[tuple[str, tuple[Picture, ...]], ...]:
    """The turns' words with a mark for each picture, and the pictures; `own` are those that its parts name already.

    Without a column of such pictures `<image>` and `<video>` are words like any others.
    """
    rest: dict[str, Iterator[Picture]] = {}
    for kind in Kind:
        listed = column_pictures(row, kind)
        tags = sum(content.count(kind.tag) for content in contents)
        if listed and tags != len(listed):
            raise DatasetError(
                f"{row.place}: {tags} x {kind.tag} in the messages, but {len(listed)} in the column of {kind}s; write"
                f" {kind.tag} once for each of them, where it is to be seen"
            )
        if listed:
            rest[kind.tag] = iter(listed)
    return tuple(_fill(content, iter(named), rest) for content, named in zip(contents, own, strict=True))


def _fill(
    content: str, named: Iterator[Picture], listed: Mapping[str, Iterator[Picture]]
) -> tuple[str, tuple[Picture, ...]]:
    found = re.findall("|".join(map(re.escape, (MARK, *listed))), content)
    for tag in listed:
        content = content.replace(tag, MARK)
    return content, tuple(next(named if sign == MARK else listed[sign]) for sign in found)


def _picture(row: Row, where: str, value: object, kind: Kind) -> Picture:
    if isinstance(value, dict):  # OpenAI's {"url": ...}, or datasets' {"bytes": ..., "path": ...}
        for key in ("url", "bytes", "path"):
            if value.get(key):
                return _picture(row, f"{where}.{key}", value[key], kind)
    if kind is Kind.VIDEO and isinstance(value, list) and value:
        frames = [_picture(row, f"{where}[{index}]", frame, Kind.IMAGE) for index, frame in enumerate(value)]
        if all(frame.path for frame in frames):
            return Picture(kind=kind, frames=tuple(frame.path for frame in frames))
    if isinstance(value, bytes) and value:
        return Picture(data=value, kind=kind)
    if not isinstance(value, str) or not value:
        expected = "an image's path or its bytes" if kind is Kind.IMAGE else "a video's path, or those of its frames"
        raise DatasetError(f"{where}: expected {expected}, found {describe(value)}")
    if value.startswith("data:"):
        return Picture(data=_decode(where, value, kind), kind=kind)
    if value.startswith(("http://", "https://")):
        raise DatasetError(
            f"{where}: {value[:200]} is on the network, where each epoch would fetch it again; store it beside the rows"
            " and give its path"
        )
    return Picture(path=str(row.folder / Path(value.removeprefix("file://"))), kind=kind)


def _decode(where: str, url: str, kind: Kind) -> bytes:
    head, _, body = url.partition(",")
    try:
        if head.endswith(";base64"):
            return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise DatasetError(f"{where}: expected the {kind} in base64, found text that is none ({error})") from error
    raise DatasetError(f"{where}: expected data:{kind}/...;base64,..., found {describe(head)}")
