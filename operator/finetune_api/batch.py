"""Computes the effective batch: micro_batch_size x accumulation_steps x world_size."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

AUTO: Literal["auto"] = "auto"  # the trainer chooses the largest micro-batch that fits into memory
MicroBatchSize = int | Literal["auto"]


class BatchError(ValueError):
    """Raised for inconsistent or indivisible batch sizes; the message contains the nearest valid values."""


@dataclass(frozen=True)
class Batch:
    """The three factors of the effective batch of an optimizer step."""

    micro_batch_size: int
    accumulation_steps: int
    world_size: int

    @property
    def effective(self) -> int:
        """Samples per optimizer step across all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def __str__(self) -> str:
        return f"{self.micro_batch_size} x {self.accumulation_steps} x {self.world_size} = {self.effective}"


def resolve_batch(
    *,
    micro_batch_size: MicroBatchSize | None,
    accumulation_steps: int | None,
    effective_batch: int | None,
    world_size: int,
) -> Batch:
    """Return the batch with the given sizes; missing sizes are derived from the others or set to 1.

    `auto` is treated as 1 until the trainer has chosen a size.

    Raises: BatchError if `effective_batch` is given and cannot be reached exactly.
    """
    micro_batch_size = None if micro_batch_size == AUTO else micro_batch_size
    if effective_batch is None:
        return Batch(micro_batch_size or 1, accumulation_steps or 1, world_size)
    if micro_batch_size is not None and accumulation_steps is not None:
        batch = Batch(micro_batch_size, accumulation_steps, world_size)
        if batch.effective != effective_batch:
            raise BatchError(
                f"globalBatchSize is {effective_batch}, but perDeviceTrainBatchSize x gradientAccumulationSteps x ranks"
                f" = {batch}; remove one of them, or make them agree"
            )
        return batch
    if accumulation_steps is not None:
        return Batch(
            _divide(effective_batch, accumulation_steps * world_size, "gradientAccumulationSteps"),
            accumulation_steps,
            world_size,
        )
    micro_batch_size = micro_batch_size or 1
    return Batch(
        micro_batch_size, _divide(effective_batch, micro_batch_size * world_size, "perDeviceTrainBatchSize"), world_size
    )


def list_batch_splits(batch: Batch) -> tuple[Batch, ...]:
    """Return all splits of the same effective batch, sorted by decreasing micro-batch size."""
    samples, ranks = batch.micro_batch_size * batch.accumulation_steps, batch.world_size
    divisors = [size for size in range(1, math.isqrt(samples) + 1) if samples % size == 0]
    sizes = sorted({*divisors, *(samples // size for size in divisors)}, reverse=True)
    return tuple(Batch(size, samples // size, ranks) for size in sizes)


def find_batch_split(batch: Batch, micro_batch_size: int | None) -> Batch | None:
    """Return the split of the same effective batch with this micro-batch size, or None if there is none."""
    return next((split for split in list_batch_splits(batch) if split.micro_batch_size == micro_batch_size), None)


def find_largest_fitting_batch(batches: Sequence[Batch], fits_in_memory: Callable[[Batch], bool]) -> Batch | None:
    """Return the first batch that fits into memory, or None if no batch fits.

    Uses binary search; `batches` must be sorted by decreasing memory.
    """
    index = bisect_left(range(len(batches)), x=True, key=lambda position: fits_in_memory(batches[position]))
    return batches[index] if index < len(batches) else None


def _divide(effective_batch: int, divisor: int, divisor_name: str) -> int:
    if effective_batch % divisor == 0:
        return effective_batch // divisor
    below, above = effective_batch // divisor * divisor, (effective_batch // divisor + 1) * divisor
    nearest = f"{below} or {above}" if below else f"{above}"
    raise BatchError(
        f"globalBatchSize {effective_batch} is not a multiple of {divisor_name} x ranks = {divisor};"
        f" the nearest multiples: {nearest}"
    )
