"""Effective batch arithmetic, in one place: per device x accumulation x world size, exact or refused."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

AUTO: Literal["auto"] = "auto"  # the trainer chooses the largest micro-batch that fits
PerDevice = int | Literal["auto"]


class BatchError(ValueError):
    """Batch numbers that contradict each other or do not divide; the message names the nearest that fit."""


@dataclass(frozen=True)
class Batch:
    """Samples per optimizer step and how they are spread; `effective` is always their product."""

    per_device: int
    accumulation: int
    world_size: int

    @property
    def effective(self) -> int:
        return self.per_device * self.accumulation * self.world_size

    def __str__(self) -> str:
        return f"{self.per_device} x {self.accumulation} x {self.world_size} = {self.effective}"


def resolve_batch(
    *, per_device: PerDevice | None, accumulation: int | None, effective: int | None, world_size: int
) -> Batch:
    """The batch that fulfils what is given; what is not given is derived, or 1, and `auto` is 1 until one is chosen.

    Raises BatchError if `effective` is given and cannot be met exactly.
    """
    per_device = None if per_device == AUTO else per_device
    if effective is None:
        return Batch(per_device or 1, accumulation or 1, world_size)
    if per_device is not None and accumulation is not None:
        batch = Batch(per_device, accumulation, world_size)
        if batch.effective != effective:
            raise BatchError(
                f"globalBatchSize is {effective}, but perDeviceTrainBatchSize x gradientAccumulationSteps x ranks"
                f" = {batch}; leave one of them out or make them agree"
            )
        return batch
    if accumulation is not None:
        return Batch(
            _quotient(effective, accumulation * world_size, "gradientAccumulationSteps"), accumulation, world_size
        )
    per_device = per_device or 1
    return Batch(per_device, _quotient(effective, per_device * world_size, "perDeviceTrainBatchSize"), world_size)


def splits(smallest: Batch) -> tuple[Batch, ...]:
    """Every batch of the same effective size, from the largest micro-batch to one sample at a time."""
    samples, ranks = smallest.per_device * smallest.accumulation, smallest.world_size
    below = [size for size in range(1, math.isqrt(samples) + 1) if samples % size == 0]
    sizes = sorted({*below, *(samples // size for size in below)}, reverse=True)
    return tuple(Batch(size, samples // size, ranks) for size in sizes)


def split_by(smallest: Batch, per_device: int | None) -> Batch | None:
    """The batch of the same effective size with so many samples at a time; None if there is none."""
    return next((batch for batch in splits(smallest) if batch.per_device == per_device), None)


def largest_that_fits(batches: Sequence[Batch], fits: Callable[[Batch], bool]) -> Batch | None:
    """Of batches that need less and less; few are tried. None if not even the last one fits."""
    index = bisect_left(range(len(batches)), x=True, key=lambda number: fits(batches[number]))
    return batches[index] if index < len(batches) else None


def _quotient(effective: int, unit: int, given: str) -> int:
    if effective % unit == 0:
        return effective // unit
    below, above = effective // unit * unit, (effective // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    raise BatchError(
        f"globalBatchSize {effective} is not a multiple of {given} x ranks = {unit}; the nearest that fit: {nearest}"
    )
