"""Checksums of files and of JSON objects, by which content that storage damaged is detected (decisions/545)."""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_supervisor.contract import parse_json

_CHUNK_BYTES = 2**24
_CHECKSUM = "checksum"  # key of a sealed JSON object


@dataclass(frozen=True)
class FileRecord:
    """Size and CRC-32 of a file when it was written; `crc32` is None if a release without checksums wrote it."""

    size_bytes: int
    crc32: str | None  # eight hexadecimal digits


def record_file(path: Path, *, report_progress: Callable[[], None] = lambda: None) -> FileRecord:
    """Read a file and return its record; `report_progress` is called after each 16 MiB."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            report_progress()
        return FileRecord(file.tell(), f"{checksum:08x}")


def find_damage(path: Path, record: FileRecord, *, report_progress: Callable[[], None] | None = None) -> str | None:
    """Return how a file differs from its record, or None.

    report_progress: called after each 16 MiB of content; None: compare the size only. Raises: OSError
    """
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != record.size_bytes:
        return f"has {size} bytes of {record.size_bytes}"
    if report_progress is None:
        return None
    found = record_file(path, report_progress=report_progress)
    return None if found == record else f"has other content than was written (CRC-32 {found.crc32}, not {record.crc32})"


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object with a checksum of the text that write_json would write without it."""
    return {**content, _CHECKSUM: f"{zlib.crc32(json.dumps(content, indent=2).encode()):08x}"}


def unseal(data: bytes, *, sealed_key: str) -> dict[str, Any]:
    """Return the JSON object that write_json wrote; it was sealed if it contains `sealed_key`.

    Raises: ValueError, TypeError or AttributeError if it is no JSON object, or differs in any byte from the sealed one
    """
    content: dict[str, Any] = parse_json(data)
    is_sealed = content.pop(_CHECKSUM, None) is not None
    if is_sealed != (sealed_key in content) or (is_sealed and data != json.dumps(seal(content), indent=2).encode()):
        raise ValueError("the checksum does not match")
    return content
