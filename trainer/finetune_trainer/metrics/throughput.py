"""One rank's measurements between two log lines."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from finetune_trainer.distributed.heartbeat_writer import peak_memory_bytes
from finetune_trainer.metrics.flops import Amount, Work


class Interval(NamedTuple):
    """Numbers only, so that one small tensor carries them to the other ranks."""

    steps: float = 0
    seconds: float = 0
    waited_seconds: float = 0  # for the next batch
    loss_seconds: float = 0  # forward passes, in which no rank waits for another unless the model is spread
    samples: float = 0
    tokens: float = 0
    flops: float = 0
    peak_memory: float = 0  # bytes, since the process began
    reserved_memory: float = 0  # bytes that torch's allocator has taken, since the process began; 0 on CPU
    peak_step: float = 0  # in which the peak was reached
    peak_longest: float = 0  # tokens of the longest sequence of that step

    @property
    def own_seconds(self) -> float:
        """Per step: what no other rank can make longer."""
        return (self.waited_seconds + self.loss_seconds) / max(self.steps, 1)


@dataclass(frozen=True)
class _Peak:
    size: int = 0
    step: int = 0
    longest: int = 0


class Meter:
    """Runs from the first batch of a step to its end; evaluation and checkpoints are not measured."""

    def __init__(self, work: Work, *, sequences: int, on_gpu: bool) -> None:
        self._work = work
        self._sequences = sequences
        self._stopwatch = _GpuStopwatch() if on_gpu else _Stopwatch()
        self._on_gpu = on_gpu
        self._began = 0.0
        self._interval = Interval()
        self._longest = 0
        self._peak = _Peak()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """A step begins with it."""
        self._began = time.perf_counter()
        yield
        waited = time.perf_counter() - self._began
        self._interval = self._interval._replace(waited_seconds=self._interval.waited_seconds + waited)

    @contextmanager
    def computing_loss(self) -> Iterator[None]:
        self._stopwatch.start()
        yield
        self._stopwatch.stop()

    def take_in(self, batches: Sequence[dict[str, torch.Tensor]]) -> None:
        """The micro-batches of the step."""
        amounts = [Amount.of(batch, sequences=self._sequences) for batch in batches]
        now, tokens = self._interval, sum(amount.tokens for amount in amounts)
        self._interval = now._replace(
            samples=now.samples + sum(amount.samples for amount in amounts),
            tokens=now.tokens + tokens,
            flops=now.flops + self._work.flops(tokens=tokens, pairs=sum(amount.pairs for amount in amounts)),
        )
        self._longest = max(amount.longest for amount in amounts)

    def end_step(self, step: int) -> None:
        now, peak = self._interval, peak_memory_bytes()
        seconds = now.seconds + time.perf_counter() - self._began
        self._interval = now._replace(steps=now.steps + 1, seconds=seconds)
        if peak > self._peak.size:
            self._peak = _Peak(peak, step, self._longest)

    def take(self) -> Interval:
        """What was measured since the last time, and begin anew."""
        measured = self._interval._replace(
            loss_seconds=self._stopwatch.take(),
            peak_memory=self._peak.size,
            reserved_memory=torch.cuda.max_memory_reserved() if self._on_gpu else 0,
            peak_step=self._peak.step,
            peak_longest=self._peak.longest,
        )
        self._interval = Interval()
        return measured


class _Stopwatch:
    def __init__(self) -> None:
        self._began = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _GpuStopwatch(_Stopwatch):
    """Measures the GPU's own time with events in its queue, without waiting for it before `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        pair[0].record()
        self._events.append(pair)

    def stop(self) -> None:
        self._events[-1][1].record()

    def take(self) -> float:
        if self._events:
            self._events[-1][1].synchronize()
        milliseconds: float = sum(start.elapsed_time(end) for start, end in self._events)
        self._events.clear()
        return milliseconds / 1000
