"""Save checkpoints in a thread of every rank, so that training continues meanwhile (decisions/530)."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from finetune_trainer.checkpoint.checkpoints import Checkpoints, Records, WriteFiles
from finetune_trainer.distributed.collectives import (
    NO_TIMEOUT,
    all_gather_objects,
    broadcast_from_rank_zero,
    raise_error,
    return_error,
)
from finetune_trainer.errors import DiskFull, TrainerError

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointPart:
    """The part of a checkpoint that one rank writes."""

    step: int
    write_files: WriteFiles
    retained_step: int | None  # the checkpoint of this step is never pruned
    staging_seconds: float  # time to copy the state, in which training waited


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint, the time until it was published, and the part of this time in which training waited."""

    name: str
    seconds: float
    waited_seconds: float


class CheckpointSaver:
    """Saves one checkpoint at a time; every rank calls the same methods, and gets the same result or TrainerError.

    The threads communicate in a process group of their own, because training uses the default group meanwhile.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._group: dist.ProcessGroup | None = None
        self._running: Future[SavedCheckpoint] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a save has ended whose result `wait` has not returned."""
        return self._running is not None and self._running.done()

    def start(self, part: CheckpointPart) -> None:
        """Start to save; the previous save must have been waited for (collective)."""
        assert self._running is None
        self._group = self._group or dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        self._running = Future()
        # A daemon thread does not delay the exit of a rank that fails while the thread waits for other ranks.
        threading.Thread(target=self._run, args=(part, self._running), name="checkpoint", daemon=True).start()

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the running save and return it; None if there is none. Raises: DiskFull or OutputError."""
        running, self._running = self._running, None
        if running is None:
            return None
        started_at = time.monotonic()
        saved = running.result()
        return replace(saved, waited_seconds=saved.waited_seconds + time.monotonic() - started_at)

    def _run(self, part: CheckpointPart, running: Future[SavedCheckpoint]) -> None:
        started_at = time.monotonic() - part.staging_seconds
        try:
            name = self._save(part)
            running.set_result(SavedCheckpoint(name, time.monotonic() - started_at, part.staging_seconds))
        except BaseException as error:
            running.set_exception(error)

    def _save(self, part: CheckpointPart) -> str:
        """Save the checkpoint; if the volume is full, free space and retry (decisions/212)."""
        result = self._try_to_save(part)
        while isinstance(result, DiskFull) and self._free_space(result, part):
            result = self._try_to_save(part)
        return raise_error(result)

    def _try_to_save(self, part: CheckpointPart) -> str | TrainerError:
        staged = return_error(lambda: self._checkpoints.stage(part.step, part.write_files))
        files_by_rank: list[Records] = []
        for files in all_gather_objects(staged, self._group):
            if isinstance(files, TrainerError):
                return files
            files_by_rank.append(files)
        return self._run_on_rank_zero(
            lambda: self._checkpoints.publish_staged(part.step, files_by_rank, retained_step=part.retained_step)
        )

    def _free_space(self, error: DiskFull, part: CheckpointPart) -> bool:
        return raise_error(
            self._run_on_rank_zero(lambda: self._checkpoints.free_space(error, retained_step=part.retained_step))
        )

    def _run_on_rank_zero(self, action: Callable[[], T]) -> T | TrainerError:
        """Return the result of rank 0, or its error, on every rank, which communicate in the group of the threads."""
        local = return_error(action) if dist.get_rank() == 0 else None
        result: T | TrainerError = broadcast_from_rank_zero(local, self._group)
        return result
