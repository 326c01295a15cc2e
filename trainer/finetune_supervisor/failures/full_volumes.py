"""Finds the full volumes of a node, because out-of-space errors rarely name the volume."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a volume of the pod
_NO_SPACE_ERROR = re.compile(
    r"no space left|errno 28\b|disk quota exceeded|errno 122\b|SIGBUS|bus error", re.IGNORECASE
)
_FULL_BELOW_BYTES = 2**20  # not 0, because the failed write may have released some space


def append_full_volumes(message: str, folders: Iterable[Path]) -> str:
    """Append the names of full volumes to an out-of-space error message, and return other messages unchanged."""
    if not _NO_SPACE_ERROR.search(message):
        return message
    full_volumes = sorted({str(folder) for folder in folders if str(folder) not in message and is_volume_full(folder)})
    return f"{message} (full: {', '.join(full_volumes)})" if full_volumes else message


def is_volume_full(folder: Path) -> bool:
    """Return whether the file system of the folder has no space left; quotas are not considered."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return False
    return stats.f_blocks > 0 and stats.f_bavail * stats.f_frsize < _FULL_BELOW_BYTES
