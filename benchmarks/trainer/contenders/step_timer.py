"""Measures the step times of all contenders identically; their trainers all subclass transformers.Trainer."""

import time
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback, trainer

from benchmarks.trainer.task import EPOCHS, Measurement
from testing.models.allocation_tracker import AllocationTracker


class Timestamp(NamedTuple):
    """Wall-clock and CPU time of this process, in seconds."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> "Timestamp":
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return cls(time.perf_counter(), time.process_time())


class StepTimer(TrainerCallback):  # type: ignore[misc]
    """Trainer callback that records the end time of each step, before a checkpoint is saved.

    tracker: if set, the peak of the tensors in each step is recorded, too.
    """

    def __init__(self, tracker: AllocationTracker | None = None) -> None:
        self.steps: list[Timestamp] = []
        self.losses: list[float] = []
        self.peaks: list[int] = []  # in bytes
        self._tracker = tracker

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._tracker is not None:
            self._tracker.peak_bytes = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(Timestamp.now())
        self.peaks.append(0 if self._tracker is None else self._tracker.peak_bytes)

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def build_measurement(self) -> Measurement:
        """Return the measurement of the last epoch; all epochs have the same number of steps."""
        steps, remainder = divmod(len(self.steps), EPOCHS)
        assert steps, "no step was recorded"
        assert not remainder, f"{len(self.steps)} steps in {EPOCHS} epochs"
        first, last = self.steps[-steps - 1], self.steps[-1]
        on_gpu = torch.cuda.is_available()
        return Measurement(
            last.seconds - first.seconds,
            last.cpu_seconds - first.cpu_seconds,
            steps,
            peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else max(self.peaks[-steps:]),
            reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else 0,
            losses=tuple(self.losses),
        )


def install_step_timer(tracker: AllocationTracker | None = None) -> StepTimer:
    """Register a timer as default callback of every Trainer that is created afterwards, and return it.

    Callbacks cannot be passed to ms-swift and our trainer, because they create their Trainer internally.
    """
    timer = StepTimer(tracker)
    callbacks = [callback for callback in trainer.DEFAULT_CALLBACKS if not isinstance(callback, StepTimer)]
    trainer.DEFAULT_CALLBACKS[:] = [*callbacks, timer]
    return timer
