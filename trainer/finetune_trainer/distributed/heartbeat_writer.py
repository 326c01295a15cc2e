"""The heartbeat of one rank: its phase, progress and memory, written to the run folder for the supervisor."""

import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat, Progress, write_heartbeat

_SECONDS_BETWEEN = 0.5


class Reporter:
    """Writes at once when the phase changes, else at most twice a second."""

    def __init__(self, folder: Path, *, rank: int, local_rank: int) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._written = 0.0
        self._beat = Heartbeat(rank=rank, local_rank=local_rank, pid=os.getpid(), time=time.time(), phase=contract.INIT)
        self._write()

    @property
    def progress(self) -> Progress:
        return self._beat.progress

    def enter(self, phase: str) -> None:
        self._beat = replace(self._beat, phase=phase)
        self._write()

    def chose(self, per_device: int) -> None:
        """So many samples at a time: from now on it is known, whatever becomes of it."""
        self._beat = replace(self._beat, progress=replace(self.progress, per_device_train_batch_size=per_device))
        self._write()

    def start_at(self, step: int, *, of: int, checkpoint: str | None) -> None:
        """Training begins or goes on at this step."""
        size = self.progress.per_device_train_batch_size
        progress = Progress(step, total_steps=of, last_checkpoint=checkpoint, per_device_train_batch_size=size)
        self._beat = replace(self._beat, first_step=step, progress=progress)
        self._write()

    def report(self, progress: Progress) -> None:
        first = self._beat.first_step
        if self._beat.first_step_time is None and first is not None and progress.step > first:
            self._beat = replace(self._beat, first_step_time=time.time())
        self._beat = replace(self._beat, progress=progress)
        self.alive()

    def measured(self, progress: Progress, *, own_step_seconds: float) -> None:
        """What a log line says."""
        self._beat = replace(self._beat, own_step_seconds=own_step_seconds)
        self.report(progress)

    def saved(self, checkpoint: str) -> None:
        self._beat = replace(self._beat, progress=replace(self.progress, last_checkpoint=checkpoint))
        self._write()

    def ended(self, words: str, *, early: bool) -> None:
        """Of training: why, and whose weights are published."""
        self._beat = replace(self._beat, progress=replace(self.progress, ended=words, stopped_early=early))
        self._write()

    def alive(self) -> None:
        """A sign of progress, even if there is nothing new to tell."""
        if time.monotonic() - self._written >= _SECONDS_BETWEEN:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._beat = replace(self._beat, time=time.time(), peak_memory_bytes=peak_memory_bytes())
        write_heartbeat(self._folder, self._beat)


def peak_memory_bytes() -> int:
    """Most memory this rank has held: on its GPU, or in RAM where there is none."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
