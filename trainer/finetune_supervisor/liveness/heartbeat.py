"""Heartbeat files: what one rank is doing, replaced by rename so that no reader ever sees half of one."""

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
class Memory:
    """The most memory that ranks have held, in bytes; the names are those of status.progress.memory in the resource."""

    forecast: int | None = None
    peak_highest: int = 0
    peak_highest_rank: int = 0
    peak_lowest: int = 0
    peak_lowest_rank: int = 0
    reserved: int | None = None
    cause: str | None = None


@dataclass(frozen=True)
class Progress:
    """How far training is; the names are those of status.progress in the resource."""

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
    memory: Memory | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of one rank. A rank that hangs leaves an old `time`."""

    rank: int
    local_rank: int
    pid: int | None  # None: a program that only reports progress
    time: float
    phase: str
    first_step: int | None = None
    first_step_time: float | None = None  # when this attempt had done a step
    peak_memory_bytes: int | None = None
    own_step_seconds: float | None = None
    progress: Progress = field(default_factory=Progress)


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    path = folder / f"rank-{heartbeat.local_rank}.json"
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    os.replace(beside, path)


def read_heartbeats(folder: Path) -> tuple[Heartbeat, ...]:
    """Those of all local ranks that have reported, by local rank; an unreadable file counts as none."""
    beats = (_read(path) for path in folder.glob("rank-*.json"))
    return tuple(sorted((beat for beat in beats if beat), key=lambda beat: beat.local_rank))


def _read(path: Path) -> Heartbeat | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        progress = _known(Progress, raw.pop("progress"))
        if progress.get("memory"):
            progress["memory"] = Memory(**_known(Memory, progress["memory"]))
        return Heartbeat(**raw, progress=Progress(**progress))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _known(kind: type[Progress | Memory], raw: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in raw.items() if name in names}


def progress_object(heartbeat: Heartbeat) -> dict[str, object]:
    """status.progress as the resource spells it: absent values left out, no NaN (JSON has none)."""
    began = heartbeat.first_step_time
    since = {"first_step": heartbeat.first_step, "first_step_time": None if began is None else rfc3339(began)}
    return {**_present({**asdict(heartbeat.progress), **since}), "updateTime": rfc3339(heartbeat.time)}


def _present(values: dict[str, Any]) -> dict[str, object]:
    told = ((name, _present(value) if isinstance(value, dict) else _finite(value)) for name, value in values.items())
    return {to_camel(name): value for name, value in told if value is not None}


def rfc3339(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
