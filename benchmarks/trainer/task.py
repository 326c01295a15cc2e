"""The training task that every contender runs, and the measurement it returns. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

EPOCHS = 2  # the first is warm-up


@dataclass(frozen=True)
class Task:
    """The settings of a training; the module of each contender translates them."""

    model: str
    rows: str  # path; with messages, as ours and ms-swift read them
    columns: str  # path; the same rows with TRL's columns
    output: str  # a folder that does not exist yet
    method: str  # sft or dpo
    family: str  # family of the vision-language model; empty for a text model
    packing: bool
    lora: bool
    gradient_checkpointing: bool
    per_device: int
    accumulation: int
    max_length: int
    dtype: str
    on_gpu: bool

    @property
    def is_multimodal(self) -> bool:
        return bool(self.family)


@dataclass(frozen=True)
class Measurement:
    """A measurement of the second epoch, which contains every row once; `error` if the training failed."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all threads; other load on the host affects it less than wall time
    steps: int = 0
    peak_bytes: int = 0  # on a GPU
    error: str = ""


@dataclass(frozen=True)
class EpochContent:
    """The content of one epoch of a task, the same for all contenders."""

    samples: int
    tokens: int  # without padding; images count as their placeholder tokens
    flops: float  # of the model for one epoch
    forecast_bytes: int | None = None  # memory forecast of a rank
