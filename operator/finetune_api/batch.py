"""Effective batch arithmetic, in one place: per device x accumulation x world size, exact or refused."""

from dataclasses import dataclass


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


def resolve_batch(*, per_device: int | None, accumulation: int | None, effective: int | None, world_size: int) -> Batch:
    """The batch that fulfils what is given; what is not given is derived, or 1.

    Raises BatchError if `effective` is given and cannot be met exactly.
    """
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


def _quotient(effective: int, unit: int, given: str) -> int:
    if effective % unit == 0:
        return effective // unit
    below, above = effective // unit * unit, (effective // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    raise BatchError(
        f"globalBatchSize {effective} is not a multiple of {given} x ranks = {unit}; the nearest that fit: {nearest}"
    )
