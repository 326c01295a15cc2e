"""Write the heartbeat of one rank (phase, progress, memory) to the run folder, where the supervisor reads it."""

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat, write_heartbeat
from finetune_supervisor.messages import Degradation, TrainingProgress
from finetune_trainer.errors import first_line

_MIN_INTERVAL_SECONDS = 0.5


class HeartbeatWriter:
    """Writes the heartbeat of one rank: immediately on a phase change, otherwise at most twice a second."""

    def __init__(self, folder: Path, *, rank: int, local_rank: int) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._written_at = 0.0
        self._unrecorded: dict[str, str] = {}
        self.started_at = time.time()  # of the rank, in seconds since the epoch
        self._heartbeat = Heartbeat(
            rank=rank, local_rank=local_rank, pid=os.getpid(), time=self.started_at, phase=contract.INIT
        )
        self._write()

    @property
    def progress(self) -> TrainingProgress:
        """The progress in the latest heartbeat."""
        return self._heartbeat.progress

    @property
    def degraded(self) -> tuple[Degradation, ...]:
        """What slows the job down, as in the latest heartbeat."""
        return self._heartbeat.degraded

    def enter_phase(self, phase: str) -> None:
        """Enter a phase and write the heartbeat. phase: one of the constants in finetune_supervisor.contract."""
        self._heartbeat = replace(self._heartbeat, phase=phase)
        self._write()

    def record_progress(self, progress: TrainingProgress) -> None:
        """Replace the progress and write the heartbeat at once, so that it is reported even if the attempt fails."""
        self._heartbeat = replace(self._heartbeat, progress=progress)
        self._write()

    def record_batch_size(self, micro_batch_size: int) -> None:
        """Write the micro-batch size at once."""
        self.record_progress(replace(self.progress, per_device_train_batch_size=micro_batch_size))

    def record_degradations(self, degraded: tuple[Degradation, ...]) -> None:
        """Write circumstances that slow the job down, or that it records less; each replaces one of the same reason."""
        by_reason = {each.reason: each for each in (*self._heartbeat.degraded, *degraded)}
        self._heartbeat = replace(self._heartbeat, degraded=tuple(by_reason.values()))
        self._write()

    @contextmanager
    def tolerate_errors(self, name: str, *files: Path) -> Iterator[None]:
        """Report an error of the `with` block, which only records what training does, and remove its files."""
        try:
            yield
        except Exception as error:  # trackers raise errors of any class
            self.report_unrecorded(name, first_line(error))
            for file in files:
                with suppress(OSError):
                    file.unlink()

    def report_unrecorded(self, name: str, problem: str) -> None:
        """Warn once that a tracker or a file that only shows progress is incomplete, and write it as a degradation."""
        if name in self._unrecorded:
            return
        self._unrecorded[name] = problem
        print(f"warning: {name} is incomplete: {problem}; the training continues", flush=True)
        listed = "; ".join(f"{each}: {cause}" for each, cause in self._unrecorded.items())
        self.record_degradations((Degradation("NotRecorded", f"incomplete; the training continues: {listed}"),))

    def start_training(self, step: int, *, total_steps: int, checkpoint: str | None) -> None:
        """Write the step at which training starts or resumes, and the checkpoint from which it resumes."""
        self._heartbeat = replace(self._heartbeat, first_step=step)
        self.record_progress(replace(self.progress, step=step, total_steps=total_steps, last_checkpoint=checkpoint))

    def update_progress(self, progress: TrainingProgress) -> None:
        """Replace the progress; the next heartbeat contains it."""
        first_step = self._heartbeat.first_step
        if self._heartbeat.first_step_time is None and first_step is not None and progress.step > first_step:
            self._heartbeat = replace(self._heartbeat, first_step_time=time.time())
        self._heartbeat = replace(self._heartbeat, progress=progress)
        self.touch()

    def update_measurements(self, progress: TrainingProgress, *, own_step_seconds: float) -> None:
        """Replace the progress and this rank's time per step, excluding the wait for other ranks."""
        self._heartbeat = replace(self._heartbeat, own_step_seconds=own_step_seconds)
        self.update_progress(progress)

    def touch(self) -> None:
        """Refresh the heartbeat, even if unchanged, unless the last write was less than half a second ago."""
        if time.monotonic() - self._written_at >= _MIN_INTERVAL_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        self._heartbeat = replace(self._heartbeat, time=time.time(), peak_memory_bytes=measure_peak_memory())
        with self.tolerate_errors("the heartbeat"):  # the next one may succeed
            write_heartbeat(self._folder, self._heartbeat)


def measure_peak_memory() -> int:
    """Return this rank's peak memory in bytes since it started: GPU memory, or resident host memory without a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
