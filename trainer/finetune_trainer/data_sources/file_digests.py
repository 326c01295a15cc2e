"""Computes digests of the files of a dataset, which identify the rows of a training (decisions/547)."""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.foreign_files import open_data_file
from finetune_trainer.storage_faults import check_is_about_content

_CHUNK_BYTES = 2**24
_MEDIA_BYTES = 2**22  # bytes of a file that are compared; most images have fewer


@dataclass(frozen=True)
class FileDigest:
    """Path, size and sha256 of a file with rows, as it was when its rows were tokenized."""

    path: str
    size_bytes: int
    sha256: str


def compute_file_digest(path: Path, *, report_progress: Callable[[], None]) -> FileDigest:
    """Read the whole file and return its digest; `report_progress` is called after each 16 MiB."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                report_progress()
            return FileDigest(str(path), file.tell(), digest.hexdigest())
    except OSError as error:  # which does not name the file
        check_is_about_content(error, f"{path} cannot be read")
        raise


def compute_media_checksum(paths: Iterable[str]) -> str:
    """Return the total size of images or videos in bytes, and the CRC-32 of their first 4 MiB. Raises: OSError."""
    size, checksum = 0, 0
    for path in paths:
        with open_data_file(path) as file:
            size += os.fstat(file.fileno()).st_size
            checksum = zlib.crc32(file.read(_MEDIA_BYTES), checksum)
    return f"{size} {checksum:08x}" if size else ""
