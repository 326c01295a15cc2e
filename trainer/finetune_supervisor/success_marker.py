"""The marker of success in a job's output, which the supervisor reads before it starts anything heavy."""

from __future__ import annotations

import json
from pathlib import Path


def success_file(output: Path) -> Path:
    return output / "result" / "SUCCESS"


def is_finished(output: Path, *, uid: str) -> bool:
    """The job of that uid has published its result there."""
    try:
        marker = json.loads(success_file(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("uid") == uid
