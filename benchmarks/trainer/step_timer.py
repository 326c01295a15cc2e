"""Measures the step times of all contenders identically; their trainers all subclass transformers.Trainer."""

import time
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback, trainer

from benchmarks.trainer.task import EPOCHS, Measurement


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
    """Trainer callback that records the end of each step, before anything is saved."""

    def __init__(self) -> None:
        self.steps: list[Timestamp] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(Timestamp.now())

    def build_measurement(self) -> Measurement:
        """Return the measurement of the last epoch; all epochs have the same number of steps."""
        steps, remainder = divmod(len(self.steps), EPOCHS)
        assert steps, "no step was recorded"
        assert not remainder, f"{len(self.steps)} steps in {EPOCHS} epochs"
        first, last = self.steps[-steps - 1], self.steps[-1]
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return Measurement(last.seconds - first.seconds, last.cpu_seconds - first.cpu_seconds, steps, peak)


def time_every_trainer() -> StepTimer:
    """Add a timer callback to every Trainer that is built from now on, and return it.

    ms-swift and our trainer build their Trainer internally, where no callback can be passed.
    """
    timer = StepTimer()
    callbacks = [callback for callback in trainer.DEFAULT_CALLBACKS if not isinstance(callback, StepTimer)]
    trainer.DEFAULT_CALLBACKS[:] = [*callbacks, timer]
    return timer
