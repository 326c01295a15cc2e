"""The time of every step, taken in the same way in every Trainer: all contenders are transformers' underneath."""

import time
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback, trainer

from benchmarks.trainer.task import EPOCHS, Answer


class Moment(NamedTuple):
    """Wall clock and CPU time of this process."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> "Moment":
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return cls(time.perf_counter(), time.process_time())


class Clock(TrainerCallback):  # type: ignore[misc]
    """The end of each step, before anything is saved."""

    def __init__(self) -> None:
        self.steps: list[Moment] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(Moment.now())

    def answer(self) -> Answer:
        """Of the last epoch; each has the same number of steps."""
        steps, rest = divmod(len(self.steps), EPOCHS)
        assert steps, "no step was seen"
        assert not rest, f"{len(self.steps)} steps in {EPOCHS} epochs"
        first, last = self.steps[-steps - 1], self.steps[-1]
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return Answer(last.seconds - first.seconds, last.cpu_seconds - first.cpu_seconds, steps, peak)


def watch_every_trainer() -> Clock:
    """From now on, until the next clock; ms-swift and our trainer build theirs where nobody else can add a callback."""
    clock = Clock()
    kept = [each for each in trainer.DEFAULT_CALLBACKS if not isinstance(each, Clock)]
    trainer.DEFAULT_CALLBACKS[:] = [*kept, clock]
    return clock
