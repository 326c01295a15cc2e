"""Writes the heartbeat of one rank to the run folder for the supervisor: phase, progress and memory."""

import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat, write_heartbeat
from finetune_supervisor.messages import TrainingProgress

_MIN_INTERVAL_SECONDS = 0.5


class HeartbeatWriter:
    """Writes the heartbeat immediately when the phase changes, otherwise at most twice a second."""

    def __init__(self, folder: Path, *, rank: int, local_rank: int) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._written_at = 0.0
        self._heartbeat = Heartbeat(
            rank=rank, local_rank=local_rank, pid=os.getpid(), time=time.time(), phase=contract.INIT
        )
        self._write()

    @property
    def progress(self) -> TrainingProgress:
        """The progress that was reported last."""
        return self._heartbeat.progress

    def enter_phase(self, phase: str) -> None:
        """Write the phase, one of those in finetune_supervisor.contract."""
        self._heartbeat = replace(self._heartbeat, phase=phase)
        self._write()

    def record_batch_size(self, per_device: int) -> None:
        """Write the micro-batch size, so that it is known even if this attempt fails with it."""
        self._heartbeat = replace(
            self._heartbeat, progress=replace(self.progress, per_device_train_batch_size=per_device)
        )
        self._write()

    def start_training(self, step: int, *, total_steps: int, checkpoint: str | None) -> None:
        """Write the step that training starts or resumes at, and the checkpoint it resumes from."""
        progress = TrainingProgress(
            step,
            total_steps=total_steps,
            last_checkpoint=checkpoint,
            per_device_train_batch_size=self.progress.per_device_train_batch_size,
        )
        self._heartbeat = replace(self._heartbeat, first_step=step, progress=progress)
        self._write()

    def update_progress(self, progress: TrainingProgress) -> None:
        """Replace the progress; written with the next heartbeat."""
        first_step = self._heartbeat.first_step
        if self._heartbeat.first_step_time is None and first_step is not None and progress.step > first_step:
            self._heartbeat = replace(self._heartbeat, first_step_time=time.time())
        self._heartbeat = replace(self._heartbeat, progress=progress)
        self.touch()

    def update_measurements(self, progress: TrainingProgress, *, own_step_seconds: float) -> None:
        """Replace the progress and this rank's own time per step."""
        self._heartbeat = replace(self._heartbeat, own_step_seconds=own_step_seconds)
        self.update_progress(progress)

    def record_checkpoint(self, checkpoint: str) -> None:
        """Write the name of the newest checkpoint."""
        self._heartbeat = replace(self._heartbeat, progress=replace(self.progress, last_checkpoint=checkpoint))
        self._write()

    def record_outcome(self, message: str, *, stopped_early: bool) -> None:
        """Write how training ended and which weights are published."""
        progress = replace(self.progress, ended=message, stopped_early=stopped_early)
        self._heartbeat = replace(self._heartbeat, progress=progress)
        self._write()

    def touch(self) -> None:
        """Write the heartbeat, even without changes, if the last write is old enough."""
        if time.monotonic() - self._written_at >= _MIN_INTERVAL_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        self._heartbeat = replace(self._heartbeat, time=time.time(), peak_memory_bytes=peak_memory_bytes())
        write_heartbeat(self._folder, self._heartbeat)


def peak_memory_bytes() -> int:
    """Return the peak memory of this rank since it started: GPU memory, or resident host memory without a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
