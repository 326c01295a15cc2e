"""Training task that every contender runs, and the measurement of a run. Uses the standard library only."""

from __future__ import annotations

from dataclasses import dataclass

EPOCHS = 2  # the first epoch is a warm-up


@dataclass(frozen=True)
class Task:
    """Settings of a training run, which each contender converts to its own options."""

    model: str
    rows: str  # path of the rows with messages, for our trainer and ms-swift
    columns: str  # path of the same rows with TRL's columns
    output: str  # output folder, which must not exist
    method: str  # sft or dpo
    family: str  # model family of a vision-language model; empty for a text model
    packing: bool
    lora: bool
    gradient_checkpointing: bool
    micro_batch_size: int
    accumulation_steps: int
    max_length: int
    dtype: str
    on_gpu: bool
    quantization: bool = False  # QLoRA: the frozen weights in nf4
    counts_tensors: bool = False  # whether to measure the peak memory of tensors on a CPU, which slows training down

    @property
    def is_multimodal(self) -> bool:
        return bool(self.family)


@dataclass(frozen=True)
class Measurement:
    """Measurement of the second epoch; `error` is set if the training failed."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # CPU time of all threads; less affected by other load than wall time
    steps: int = 0
    peak_bytes: int = 0  # peak memory of tensors; on a CPU, of the second epoch and only if it counts tensors
    reserved_bytes: int = 0  # peak memory that torch's allocator reserved on a GPU
    losses: tuple[float, ...] = ()  # training losses of all steps
    attention: str = ""  # kernels that attention calls selected, with the number of different shapes
    error: str = ""


@dataclass(frozen=True)
class MemoryForecast:
    """Forecast of the memory of a rank, in bytes; each value is an upper estimate of one measured value."""

    total: int  # memory of the process on the GPU
    allocated: int  # tensors
    reserved: int  # tensors and gaps between them


@dataclass(frozen=True)
class EpochContent:
    """Content of one epoch of a task, which is the same for all contenders."""

    samples: int
    tokens: int  # without padding; images count as their placeholder tokens
    flops: float  # model FLOPs of one epoch
    forecast: MemoryForecast | None = None
