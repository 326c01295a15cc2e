"""Log of the attempts of a job: rank 0 records its attempt in the output folder, for the report of the last attempt."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_api.batch import Batch
from finetune_api.termination import Termination, parse_termination
from finetune_api.untrusted_json import parse_untrusted_json
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor.safe_files import open_below
from finetune_trainer.atomic_files import write_json
from finetune_trainer.parallel.parallelism import describe_parallelism

ATTEMPT_FILE = "attempt.json"
_WRITE_INTERVAL_SECONDS = 10.0
_MAX_FILE_BYTES = 2**14
_MAX_ATTEMPTS = 1000
_MAX_NODES = 1024
_FOLDER_NAME = re.compile(r"attempt-(\d{1,9})")


@dataclass(frozen=True)
class AttemptEntry:
    """What rank 0 records about its attempt; times are in seconds since the epoch."""

    uid: str  # of the job, because the folder may contain the logs of another job
    attempt: int
    ranks: int
    started_at: float  # start of rank 0
    settings: dict[str, str] = field(default_factory=dict)  # settings that a repair may change
    training_at: float | None = None  # end of the first step
    first_step: int = 0  # step from which the attempt resumed
    step: int = 0  # last completed step
    updated_at: float = 0.0


@dataclass(frozen=True)
class LoggedAttempt:
    """An attempt as its output folder describes it, when a later attempt or its own end reads it."""

    entry: AttemptEntry
    last_output_at: float  # last change of a log of its nodes, 0 without logs
    failures: tuple[Termination, ...]  # final messages of its nodes, except for those that succeeded


_ENTRY_PARSER = TypeAdapter(AttemptEntry)


class AttemptLog:
    """Writes the entry of the running attempt, which only the report needs. Raises: OSError."""

    def __init__(self, logs: Path, entry: AttemptEntry) -> None:
        self._path = logs / f"attempt-{entry.attempt}" / ATTEMPT_FILE
        self._written_at = 0.0
        self.entry = entry

    def start_training(self, *, first_step: int, settings: dict[str, str]) -> None:
        """Record the step from which the attempt resumes, and its settings."""
        self.entry = replace(self.entry, first_step=first_step, settings=settings)
        self.write()

    def record_step(self, step: int) -> None:
        """Record a completed step, and write the entry for the first step and at most every ten seconds."""
        is_first = self.entry.training_at is None
        self.entry = replace(self.entry, step=step, training_at=self.entry.training_at or time.time())
        if is_first or time.monotonic() - self._written_at >= _WRITE_INTERVAL_SECONDS:
            self.write()

    def write(self) -> None:
        """Replace the file of the entry, which is not flushed, because it is replaced often."""
        self._written_at = time.monotonic()
        self.entry = replace(self.entry, updated_at=time.time())
        write_json(self._path, asdict(self.entry), durable=False)


class AttemptLogCallback(TrainerCallback):  # type: ignore[misc]
    """Records the completed steps of the running attempt."""

    def __init__(self, log: AttemptLog) -> None:
        self._log = log

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self._log.record_step(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write the entry with the last step."""
        self._log.write()


def describe_repairable_settings(spec: TrainerSpec, batch: Batch, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that a repair after an out-of-memory failure may change, by their name in messages."""
    interval = spec.training.recomputation_interval
    segments = "expandable_segments:True" in environment.get("PYTORCH_ALLOC_CONF", "")
    return {
        "batch": str(batch),
        "gradient checkpointing": f"every {interval} layer(s)" if interval else "off",
        "parallelism": describe_parallelism(spec),
        "expandable segments": "on" if segments else "off",
        "dataset.numWorkers": str(spec.dataset.num_workers if spec.dataset.num_workers is not None else "default"),
    }


def read_attempts(logs: Path, *, uid: str) -> tuple[LoggedAttempt, ...]:
    """Return the recorded attempts of the job in their order. The files are untrusted: invalid ones are left out."""
    folders = (folder for folder in logs.glob("attempt-*") if _FOLDER_NAME.fullmatch(folder.name))
    newest = sorted(folders, key=lambda folder: int(folder.name.partition("-")[2]))[-_MAX_ATTEMPTS:]
    attempts = (_read_attempt(folder) for folder in newest)
    return tuple(attempt for attempt in attempts if attempt is not None and attempt.entry.uid == uid)


def _read_attempt(folder: Path) -> LoggedAttempt | None:
    content = _read_bounded(folder / ATTEMPT_FILE)
    entry = None if content is None else parse_untrusted_json(_ENTRY_PARSER, content)
    if entry is None or entry.ranks < 1 or f"attempt-{entry.attempt}" != folder.name:
        return None
    contents = (_read_bounded(path) for path in islice(folder.glob("node-*.json"), _MAX_NODES))
    parsed = (parse_termination(content) for content in contents)
    # An older message is that of another job, whose logs were in this folder.
    messages = [message for message in parsed if message and (message.time or 0.0) >= entry.started_at]
    return LoggedAttempt(
        _add_progress(entry, messages),
        max(map(_read_modification_time, islice(folder.glob("node-*.log"), _MAX_NODES)), default=0.0),
        tuple(message for message in messages if message.outcome != "succeeded"),
    )


def _add_progress(entry: AttemptEntry, messages: Sequence[Termination]) -> AttemptEntry:
    """Return the entry with the progress in the final message of node 0, which may be newer than the last write."""
    progress = next((message.progress for message in messages if message.node_rank == 0), None)
    if progress is None or progress.first_step_time is None or progress.update_time is None:
        return entry
    return replace(
        entry,
        training_at=entry.training_at or progress.first_step_time.timestamp(),
        step=max(entry.step, progress.step),
        updated_at=max(entry.updated_at, progress.update_time.timestamp()),
    )


def _read_bounded(path: Path) -> str | None:
    """Return the text of a small regular file, or None."""
    try:
        with open(open_below(path, os.O_RDONLY, create_folder=False), "rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return content.decode("utf-8", "replace") if len(content) <= _MAX_FILE_BYTES else None


def _read_modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
