"""Which folders of a node are full: an error seldom says where there was no space left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a volume of the pod
_NO_SPACE = re.compile(r"no space left|errno 28\b|disk quota exceeded|errno 122\b|SIGBUS|bus error", re.IGNORECASE)
_ALMOST_NOTHING = 2**20  # bytes; what wrote last may have given back the part of a page


def name_full(message: str, folders: Iterable[Path]) -> str:
    """The message, with the full ones of these folders that it does not name, if it is about space."""
    if not _NO_SPACE.search(message):
        return message
    full = sorted({str(folder) for folder in folders if str(folder) not in message and is_full(folder)})
    return f"{message} (full: {', '.join(full)})" if full else message


def is_full(folder: Path) -> bool:
    """Whether its volume has no room left; a quota is not seen."""
    try:
        there = os.statvfs(folder)
    except OSError:
        return False
    return there.f_blocks > 0 and there.f_bavail * there.f_frsize < _ALMOST_NOTHING
