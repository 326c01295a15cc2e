"""Computes the sha256 of the files of a dataset, by which the model card identifies the rows of a training."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.storage_faults import check_is_about_content

_CHUNK_BYTES = 2**24


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
