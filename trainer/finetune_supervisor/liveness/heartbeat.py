"""Heartbeat files, one per rank, replaced atomically so that readers never get partial files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from finetune_supervisor.contract import parse_json
from finetune_supervisor.messages import (
    Degradation,
    NetworkBandwidth,
    NodePairBandwidth,
    PeakMemory,
    TrainingProgress,
)


@dataclass(frozen=True)
class Heartbeat:
    """Last heartbeat of one rank; `time` is in seconds since the epoch."""

    rank: int
    local_rank: int
    pid: int | None  # None for a user command that reports only progress
    time: float
    phase: str
    first_step: int | None = None
    first_step_time: float | None = None  # completion of the first step in this attempt, seconds since the epoch
    peak_memory_bytes: int | None = None
    own_step_seconds: float | None = None
    degraded: tuple[Degradation, ...] = ()
    progress: TrainingProgress = field(default_factory=TrainingProgress)


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    """Write or replace the heartbeat file of the rank."""
    path = folder / f"rank-{heartbeat.local_rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    os.replace(temporary, path)


def read_heartbeats(folder: Path) -> tuple[Heartbeat, ...]:
    """Return the heartbeats of this node ordered by local rank, skipping invalid files."""
    heartbeats = (_read_heartbeat(path) for path in folder.glob("rank-*.json"))
    return tuple(
        sorted((heartbeat for heartbeat in heartbeats if heartbeat), key=lambda heartbeat: heartbeat.local_rank)
    )


def _read_heartbeat(path: Path) -> Heartbeat | None:
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
        progress = _drop_unknown_fields(TrainingProgress, raw.pop("progress"))
        if progress.get("memory"):
            progress["memory"] = PeakMemory(**_drop_unknown_fields(PeakMemory, progress["memory"]))
        if progress.get("network"):
            network = _drop_unknown_fields(NetworkBandwidth, progress["network"])
            pairs = tuple(NodePairBandwidth(pair["nodes"], pair["gbps"]) for pair in network.get("pairs", ()))
            progress["network"] = NetworkBandwidth(**{**network, "pairs": pairs})
        degraded = tuple(Degradation(item["reason"], item["message"]) for item in raw.pop("degraded", ()))
        return Heartbeat(**raw, degraded=degraded, progress=TrainingProgress(**progress))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _drop_unknown_fields(
    message_class: type[TrainingProgress | PeakMemory | NetworkBandwidth], raw_fields: dict[str, Any]
) -> dict[str, Any]:
    names = {item.name for item in fields(message_class)}
    return {name: value for name, value in raw_fields.items() if name in names}


def to_status_progress(heartbeat: Heartbeat) -> TrainingProgress:
    """Return the progress for the job status, with the attempt's first step and the times of the heartbeat."""
    return replace(
        heartbeat.progress,
        first_step=heartbeat.first_step,
        first_step_time=None if heartbeat.first_step_time is None else _to_datetime(heartbeat.first_step_time),
        update_time=_to_datetime(heartbeat.time),
    )


def _to_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)  # noqa: UP017 (Python 3.9 has no datetime.UTC)
