"""Which images a row shows, and where in its words: OpenAI's parts, or `<image>` with a column `images`."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.data.rows import Row, describe
from finetune_trainer.errors import DatasetError

TAG = "<image>"  # in the words of a row, for the next entry of its column
MARK = "\ufffc\ue0f0"  # in ours, for the next of a turn's pictures; two characters that no text has together
COLUMNS = ("images", "image")
_PART_KEYS = ("image", "path", "url", "image_url", "bytes")


@dataclass(frozen=True)
class Picture:
    """An image by its path, or itself as a file's bytes."""

    path: str = ""
    data: bytes = b""


def part_picture(row: Row, where: str, part: dict[str, object]) -> Picture | None:
    """What a part of a message shows; None if it only says that the next entry of the column is shown here."""
    named = [key for key in _PART_KEYS if part.get(key) is not None]
    return _picture(row, f"{where}.{named[0]}", part[named[0]]) if named else None


def column_pictures(row: Row) -> tuple[Picture, ...]:
    """Those of the row's column, in its order; none if it has no such column."""
    for name in COLUMNS:
        value = row.columns.get(name)
        if value is not None and value != "":
            entries = value if isinstance(value, list) else [value]
            return tuple(
                _picture(row, f"{row.place}, column {name}[{index}]", entry) for index, entry in enumerate(entries)
            )
    return ()


def place_pictures(
    row: Row, contents: Sequence[str], own: Sequence[tuple[Picture, ...]]
) -> tuple[tuple[str, tuple[Picture, ...]], ...]:
    """The turns' words with a mark for each picture, and the pictures; `own` are those that its parts name already.

    Without a column of pictures `<image>` is a word like any other.
    """
    listed = column_pictures(row)
    tags = sum(content.count(TAG) for content in contents)
    if not listed:
        return tuple(zip(contents, own, strict=True))
    if tags != len(listed):
        raise DatasetError(
            f"{row.place}: {tags} x {TAG} in the messages, but {len(listed)} in the column of images; write {TAG} once"
            " for each of them, where it is to be seen"
        )
    rest = iter(listed)
    return tuple(_fill(content, iter(named), rest) for content, named in zip(contents, own, strict=True))


def _fill(content: str, named: Iterator[Picture], listed: Iterator[Picture]) -> tuple[str, tuple[Picture, ...]]:
    found = re.findall(f"{re.escape(TAG)}|{re.escape(MARK)}", content)
    return content.replace(TAG, MARK), tuple(next(listed if tag == TAG else named) for tag in found)


def _picture(row: Row, where: str, value: object) -> Picture:
    if isinstance(value, dict):  # OpenAI's {"url": ...}, or datasets' {"bytes": ..., "path": ...}
        for key in ("url", "bytes", "path"):
            if value.get(key):
                return _picture(row, f"{where}.{key}", value[key])
    if isinstance(value, bytes) and value:
        return Picture(data=value)
    if not isinstance(value, str) or not value:
        raise DatasetError(f"{where}: expected an image's path or its bytes, found {describe(value)}")
    if value.startswith("data:"):
        return Picture(data=_decode(where, value))
    if value.startswith(("http://", "https://")):
        raise DatasetError(
            f"{where}: {value[:200]} is on the network, where each epoch would fetch it again; store it beside the rows"
            " and give its path"
        )
    return Picture(path=str(row.folder / Path(value.removeprefix("file://"))))


def _decode(where: str, url: str) -> bytes:
    head, _, body = url.partition(",")
    try:
        if head.endswith(";base64"):
            return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise DatasetError(f"{where}: expected an image in base64, found text that is none ({error})") from error
    raise DatasetError(f"{where}: expected data:image/...;base64,..., found {describe(head)}")
