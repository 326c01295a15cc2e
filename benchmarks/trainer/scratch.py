"""Chooses the folder for models and outputs of a benchmark. Uses the standard library only."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 48 * 2**30  # the largest model, its rows and outputs, with a margin


def choose_scratch_folder() -> Path:
    """Return TMPDIR if it is set, else /dev/shm if it has enough free space, else the folder for temporary files.

    Models in main memory are read faster, and do not fill the disk of a rented machine.
    """
    if "TMPDIR" not in os.environ and os.access(_SHARED_MEMORY, os.W_OK):
        statistics = os.statvfs(_SHARED_MEMORY)
        if statistics.f_bavail * statistics.f_frsize > _NEEDED_BYTES:
            return _SHARED_MEMORY
    return Path(tempfile.gettempdir())
