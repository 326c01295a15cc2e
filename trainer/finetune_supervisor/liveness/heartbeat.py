"""Heartbeat files, one per rank; each is replaced by a rename, so that a reader never gets a partial file."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from finetune_supervisor.contract import to_camel


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of the ranks in bytes; the fields are those of status.progress.memory of the custom resource."""

    forecast: int | None = None
    peak_highest: int = 0
    peak_highest_rank: int = 0
    peak_lowest: int = 0
    peak_lowest_rank: int = 0
    reserved: int | None = None
    cause: str | None = None


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of the training; the fields are those of status.progress of the custom resource."""

    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    mfu: float | None = None
    data_wait_share: float | None = None
    slow_rank: str | None = None
    eta_seconds: int | None = None
    last_checkpoint: str | None = None
    best_step: int | None = None
    best_metric: float | None = None
    stopped_early: bool | None = None
    ended: str | None = None
    per_device_train_batch_size: int | None = None
    memory: PeakMemory | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of one rank; that of a hanging rank has an old `time`, in seconds since the epoch."""

    rank: int
    local_rank: int
    pid: int | None  # None: a user's program that reports only progress
    time: float
    phase: str
    first_step: int | None = None
    first_step_time: float | None = None  # when this attempt completed its first step
    peak_memory_bytes: int | None = None
    own_step_seconds: float | None = None
    progress: TrainingProgress = field(default_factory=TrainingProgress)


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    """Write or replace the heartbeat file of the rank."""
    path = folder / f"rank-{heartbeat.local_rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    os.replace(temporary, path)


def read_heartbeats(folder: Path) -> tuple[Heartbeat, ...]:
    """Return the heartbeats of this node, ordered by local rank; unreadable files are skipped."""
    beats = (_read(path) for path in folder.glob("rank-*.json"))
    return tuple(sorted((beat for beat in beats if beat), key=lambda beat: beat.local_rank))


def _read(path: Path) -> Heartbeat | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        progress = _drop_unknown_fields(TrainingProgress, raw.pop("progress"))
        if progress.get("memory"):
            progress["memory"] = PeakMemory(**_drop_unknown_fields(PeakMemory, progress["memory"]))
        return Heartbeat(**raw, progress=TrainingProgress(**progress))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _drop_unknown_fields(kind: type[TrainingProgress | PeakMemory], raw: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in raw.items() if name in names}


def to_status_progress(heartbeat: Heartbeat) -> dict[str, object]:
    """Return status.progress in the spelling of the custom resource, without absent values and NaN (not in JSON)."""
    started_at = heartbeat.first_step_time
    first_step_time = None if started_at is None else format_rfc3339(started_at)
    attempt = {"first_step": heartbeat.first_step, "first_step_time": first_step_time}
    return {**_present({**asdict(heartbeat.progress), **attempt}), "updateTime": format_rfc3339(heartbeat.time)}


def _present(values: dict[str, Any]) -> dict[str, object]:
    present = ((name, _present(value) if isinstance(value, dict) else _finite(value)) for name, value in values.items())
    return {to_camel(name): value for name, value in present if value is not None}


def format_rfc3339(seconds: float) -> str:
    """Format seconds since the epoch as an RFC 3339 timestamp in UTC with milliseconds."""
    date_time = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{date_time}.{int(seconds % 1 * 1000):03d}Z"


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
