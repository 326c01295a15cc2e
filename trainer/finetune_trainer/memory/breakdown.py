"""Break down the memory of a rank and of a node into named parts, computed from the model's shape."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from finetune_trainer.memory.fake_step import ActivationMemory
from finetune_trainer.memory.model_shape import ModelShape
from finetune_trainer.units import GIB

ADAMW_STATES = 2  # first and second moment of each gradient, in the dtype of the weight
# The next four are upper estimates of memory outside tensors, from published measurements: docs/user-guide/memory.md.
_CUDA_CONTEXT = GIB  # kernels and the workspaces of cuBLAS and of attention
_NCCL_BUFFERS = int(0.4 * GIB)
FRAGMENTATION = 0.05  # share of the allocated bytes that is lost in gaps between blocks
_UNUSABLE_LOGITS = 1 / 6  # one 16-bit copy: the allocator can rarely reuse a freed block of that size
_GPU_PROCESS = int(2.5 * GIB)  # host memory: libraries of torch and CUDA, pinned buffers
_CPU_PROCESS = int(0.8 * GIB)
_LOADER_WORKER = int(0.2 * GIB)


@dataclass(frozen=True)
class MemoryPart:
    """A named part of a memory breakdown; `size` is in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class MemoryBreakdown:
    """The contents of one memory at its peak."""

    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> int:
        """Return the sum of all parts in bytes."""
        return total_bytes(self.parts)

    @property
    def largest(self) -> MemoryPart:
        """Return the part that needs the most bytes."""
        return max(self.parts, key=lambda part: part.size)


@dataclass(frozen=True)
class ModelStateFootprint:
    """Memory of one rank for weights, gradients and optimizer states, without activations."""

    resident: tuple[MemoryPart, ...] = ()  # on the device during the whole run
    offloaded: tuple[MemoryPart, ...] = ()  # in host memory during the whole run
    forward_backward: tuple[MemoryPart, ...] = ()  # on the device during forward and backward only
    optimizer_step: tuple[MemoryPart, ...] = ()  # on the device during the optimizer step, without activations
    fragmented_bytes: int = 0  # freed on the GPU, but not reusable by the allocator


class ShardingStrategy(Protocol):
    """Computes how a model's states are divided over the ranks."""

    def footprint(self, shape: ModelShape, ranks: int) -> ModelStateFootprint:
        """Return the memory of one rank, given the number of ranks."""


@dataclass(frozen=True)
class DdpStrategy:
    """Every rank holds the full model (DDP). Gradients always count, because accumulation keeps them."""

    on_gpu: bool

    def footprint(self, shape: ModelShape, ranks: int) -> ModelStateFootprint:
        """Return the memory of one rank, with the gradient buckets that DDP adds.

        accelerate chooses DDP for more than one GPU, and always on CPU.
        """
        weights = shape.frozen_bytes + shape.buffer_bytes
        adapters = shape.trained_bytes if shape.has_adapters else 0
        resident = (
            MemoryPart("weights", weights + shape.trained_bytes - adapters),
            MemoryPart("reference model", shape.reference_bytes),
            MemoryPart("adapters", adapters),
            MemoryPart("gradients", shape.trained_bytes),
            MemoryPart("optimizer states", ADAMW_STATES * shape.trained_bytes),
        )
        uses_ddp = ranks > 1 or not self.on_gpu
        buckets = MemoryPart("gradient buckets", shape.trained_bytes if uses_ddp else 0)
        return ModelStateFootprint(resident, forward_backward=(buckets,))


@dataclass(frozen=True)
class RankLayout:
    """Number of ranks, their placement on nodes, their device and how the model is sharded."""

    world_size: int
    ranks_per_node: int
    loader_workers_per_rank: int
    on_gpu: bool
    sharding: ShardingStrategy | None = None  # None: DDP

    def footprint(self, shape: ModelShape) -> ModelStateFootprint:
        """Return the memory of one rank for the model's states."""
        return (self.sharding or DdpStrategy(self.on_gpu)).footprint(shape, self.world_size)


def activation_parts(peak: ActivationMemory) -> tuple[MemoryPart, ...]:
    """Return the parts that exist only during a micro-batch."""
    return MemoryPart("activations", peak.activations), MemoryPart("logits and loss", peak.logits)


def break_down_rank_memory(shape: ModelShape, peak: ActivationMemory, layout: RankLayout) -> MemoryBreakdown:
    """Return the peak memory of one rank on its device, which is host memory on CPU."""
    footprint = layout.footprint(shape)
    resident = footprint.resident if layout.on_gpu else (*footprint.resident, *footprint.offloaded)
    forward_backward = (*footprint.forward_backward, *activation_parts(peak))
    allocated = (*resident, *max(forward_backward, footprint.optimizer_step, key=total_bytes))
    gaps = _UNUSABLE_LOGITS * peak.logits + footprint.fragmented_bytes
    return _without_empty((*allocated, *(_gpu_parts(allocated, gaps, layout) if layout.on_gpu else ())))


def total_bytes(parts: Iterable[MemoryPart]) -> int:
    """Return the sum of the parts in bytes."""
    return sum(part.size for part in parts)


def break_down_node_memory(shape: ModelShape, rank: MemoryBreakdown, layout: RankLayout) -> MemoryBreakdown:
    """Return the peak host memory of a node, where each rank loads the weights before moving them to its GPU."""
    ranks = layout.ranks_per_node
    loaders = MemoryPart("data loaders", ranks * layout.loader_workers_per_rank * _LOADER_WORKER)
    if not layout.on_gpu:
        processes = MemoryPart("processes", ranks * _CPU_PROCESS)
        return _without_empty((processes, MemoryPart("ranks", ranks * rank.total), loaders))
    processes = MemoryPart("processes", ranks * _GPU_PROCESS)
    loaded_bytes = shape.frozen_bytes + shape.loaded_bytes + shape.reference_bytes
    weights = MemoryPart("weights being loaded", ranks * loaded_bytes)
    training = (loaders, MemoryPart("offloaded", ranks * total_bytes(layout.footprint(shape).offloaded)))
    return _without_empty((processes, *max((weights,), training, key=total_bytes)))


def _gpu_parts(allocated: Iterable[MemoryPart], gaps: float, layout: RankLayout) -> tuple[MemoryPart, ...]:
    return (
        MemoryPart("CUDA context", _CUDA_CONTEXT),
        MemoryPart("NCCL buffers", _NCCL_BUFFERS if layout.world_size > 1 else 0),
        MemoryPart("fragmentation", int(gaps + FRAGMENTATION * total_bytes(allocated))),
    )


def _without_empty(parts: Iterable[MemoryPart]) -> MemoryBreakdown:
    return MemoryBreakdown(tuple(part for part in parts if part.size))
