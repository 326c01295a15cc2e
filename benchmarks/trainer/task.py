"""One training that every contender does: what it is told, and what it answers. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

EPOCHS = 2  # the first is warm-up


@dataclass(frozen=True)
class Task:
    """The same numbers for all; each contender's module says them in its own words."""

    model: str
    rows: str  # as ours and ms-swift spell them
    columns: str  # the same as TRL spells them
    output: str  # a folder that is not there yet
    method: str  # sft or dpo
    family: str  # of a model that sees; empty where nothing is seen
    packing: bool
    lora: bool
    checkpointing: bool
    per_device: int
    accumulation: int
    max_length: int
    dtype: str
    on_gpu: bool

    @property
    def sees(self) -> bool:
        return bool(self.family)


@dataclass(frozen=True)
class Answer:
    """Of the second epoch: every row once. `error` says why there is nothing."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all threads: what else the machine does disturbs it less
    steps: int = 0
    peak_bytes: int = 0  # on a GPU
    error: str = ""


@dataclass(frozen=True)
class Content:
    """What one epoch of a task holds, whoever trains on it."""

    samples: int
    tokens: int  # no padding; of images, their placeholders
    flops: float  # that the model needs for them
    forecast_bytes: int | None = None  # of a rank's memory
