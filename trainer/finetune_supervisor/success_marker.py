"""Success marker in a job's output folder, which the supervisor checks before it starts a process."""

from __future__ import annotations

from pathlib import Path

from finetune_supervisor.contract import parse_json


def get_success_marker_path(output: Path) -> Path:
    """Return the path of the success marker in the output folder."""
    return output / "result" / "SUCCESS"


def is_result_published(output: Path, *, uid: str) -> bool:
    """Return whether the job with this UID has published its result in the output folder."""
    try:
        marker = parse_json(get_success_marker_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("uid") == uid
