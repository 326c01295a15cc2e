"""Measure time, samples, tokens, FLOPs and peak memory of one rank between two log entries."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from finetune_trainer.cluster_check.gpu_counters import NvmlGpu
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.distributed.heartbeat_writer import measure_peak_memory
from finetune_trainer.metrics.flops import FlopsEstimate, MicroBatchCounts


class MeasuredInterval(NamedTuple):
    """Measurements of one rank in one interval; all are floats, so that ranks can exchange them in one tensor."""

    steps: float = 0
    seconds: float = 0
    data_wait_seconds: float = 0  # time spent waiting for the next batch
    loss_seconds: float = 0  # time of forward passes, which contain collectives only if the model is sharded
    samples: float = 0
    tokens: float = 0
    flops: float = 0
    peak_bytes: float = 0  # peak memory since the process started
    reserved_bytes: float = 0  # peak memory that torch's allocator reserved since the process started; 0 on CPU
    peak_step: float = 0  # step in which the memory peak occurred
    peak_longest_sequence: float = 0  # tokens of the longest sequence in that step
    gpu_utilization: float = math.nan  # share of the last sample period in which the GPU ran a kernel; NaN if unknown
    compute_seconds: float = 0  # estimated time of forward and backward passes and of data loading

    @property
    def own_step_seconds(self) -> float:
        """Seconds per step for data loading and forward passes, without the wait for other ranks."""
        return (self.data_wait_seconds + self.loss_seconds) / max(self.steps, 1)


@dataclass(frozen=True)
class _Peak:
    size_bytes: int = 0
    step: int = 0
    longest_sequence: int = 0


class StepMeter:
    """Measures training steps, excluding evaluation and checkpoints."""

    def __init__(
        self, flops: FlopsEstimate, *, sequences_per_sample: int, device: torch.device, recomputed_share: float
    ) -> None:
        """Create a meter.

        sequences_per_sample: 2 for preferences, otherwise 1. recomputed_share: part of the forward pass that
        activation checkpointing repeats in the backward pass.
        """
        on_gpu = device.type == "cuda"
        self._flops = flops
        self._compute_multiple = flops.forward_multiple + recomputed_share
        self._gpu = NvmlGpu(device)
        self._sequences_per_sample = sequences_per_sample
        self._loss_stopwatch = _GpuStopwatch() if on_gpu else _Stopwatch()
        self._on_gpu = on_gpu
        self._step_started_at = 0.0
        self._interval = MeasuredInterval()
        self._longest_sequence = 0
        self._peak = _Peak()

    @contextmanager
    def measure_data_wait(self) -> Iterator[None]:
        """Start a step, and add the duration of the `with` block to the data wait."""
        self._step_started_at = time.perf_counter()
        yield
        wait_seconds = time.perf_counter() - self._step_started_at
        self._interval = self._interval._replace(data_wait_seconds=self._interval.data_wait_seconds + wait_seconds)

    @contextmanager
    def measure_loss(self) -> Iterator[None]:
        """Add the duration of the `with` block to the time of the loss computation."""
        self._loss_stopwatch.start()
        yield
        self._loss_stopwatch.stop()

    def add_micro_batches(self, batches: Sequence[MicroBatch]) -> None:
        """Count the samples, tokens and FLOPs of the micro-batches of a step."""
        counts = [
            MicroBatchCounts.from_batch(batch, sequences_per_sample=self._sequences_per_sample) for batch in batches
        ]
        interval, tokens = self._interval, sum(count.tokens for count in counts)
        computed_tokens = tokens - sum(count.shared_tokens for count in counts)
        attention_pairs = sum(count.attention_pairs for count in counts)
        self._interval = interval._replace(
            samples=interval.samples + sum(count.samples for count in counts),
            tokens=interval.tokens + tokens,
            flops=interval.flops + self._flops.total(tokens=computed_tokens, attention_pairs=attention_pairs),
        )
        self._longest_sequence = max(count.longest_sequence for count in counts)

    def end_step(self, step: int) -> None:
        """Add the duration of the step, and record the step if it raised the memory peak."""
        interval, peak_bytes = self._interval, measure_peak_memory()
        seconds = interval.seconds + time.perf_counter() - self._step_started_at
        self._interval = interval._replace(steps=interval.steps + 1, seconds=seconds)
        if peak_bytes > self._peak.size_bytes:
            self._peak = _Peak(peak_bytes, step, self._longest_sequence)

    def collect(self) -> MeasuredInterval:
        """Return the measurements since the last call and start a new interval; memory peaks are never reset."""
        loss_seconds, utilization = self._loss_stopwatch.collect(), self._gpu.read_utilization()
        interval = self._interval._replace(
            loss_seconds=loss_seconds,
            compute_seconds=self._interval.data_wait_seconds + self._compute_multiple * loss_seconds,
            gpu_utilization=math.nan if utilization is None else utilization,
            peak_bytes=self._peak.size_bytes,
            reserved_bytes=torch.cuda.max_memory_reserved() if self._on_gpu else 0,
            peak_step=self._peak.step,
            peak_longest_sequence=self._peak.longest_sequence,
        )
        self._interval = MeasuredInterval()
        return interval


class _Stopwatch:
    def __init__(self) -> None:
        self._started_at = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        self._started_at = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._started_at

    def collect(self) -> float:
        """Return the measured seconds and reset them to zero."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _GpuStopwatch(_Stopwatch):
    """Measures GPU time with CUDA events; synchronizes with the GPU only in `collect`."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        pair[0].record()
        self._events.append(pair)

    def stop(self) -> None:
        self._events[-1][1].record()

    def collect(self) -> float:
        if self._events:
            self._events[-1][1].synchronize()
        milliseconds: float = sum(start.elapsed_time(end) for start, end in self._events)
        self._events.clear()
        return milliseconds / 1000
