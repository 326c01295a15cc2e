"""Break down the peak memory of a rank and of a node into named parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from finetune_trainer.checkpoint.state_files import MAX_FILE_BYTES
from finetune_trainer.memory.fake_step import ActivationMemory
from finetune_trainer.memory.model_shape import ModelShape
from finetune_trainer.units import GIB

WEIGHTS, REFERENCE, ADAPTERS = "weights", "reference model", "adapters"
_OFFLOADED = "offloaded "
# The next four constants are upper estimates of memory outside tensors, based on the published measurements in
# docs/user-guide/memory.md.
_CUDA_CONTEXT = GIB  # GPU memory for loaded kernels and the workspaces of cuBLAS and attention
_NCCL_BUFFERS = int(0.4 * GIB)
FRAGMENTATION = 0.05  # fraction of the allocated bytes that is lost in gaps between blocks
_UNUSABLE_LOGITS = 1 / 6  # as a fraction of the logits: a freed 16-bit copy, whose memory is rarely reused
_GPU_PROCESS = int(2.5 * GIB)  # host memory for the libraries of torch and CUDA and for pinned buffers
_CPU_PROCESS = int(0.8 * GIB)
_LOADER_WORKER = int(0.2 * GIB)


@dataclass(frozen=True)
class MemoryPart:
    """A named part of a memory breakdown; `size` is in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class MemoryBreakdown:
    """Peak memory of a device or host, divided into parts."""

    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> int:
        """Return the sum of all parts in bytes."""
        return sum_bytes(self.parts)


@dataclass(frozen=True)
class ModelStateFootprint:
    """Memory of weights, gradients and optimizer states on one rank, without activations."""

    resident_parts: tuple[MemoryPart, ...] = ()  # on the device during the whole run
    offloaded_parts: tuple[MemoryPart, ...] = ()  # in host memory during the whole run
    forward_backward_parts: tuple[MemoryPart, ...] = ()  # on the device during forward and backward only
    optimizer_step_parts: tuple[MemoryPart, ...] = ()  # on the device during the optimizer step, without activations
    fragmented_bytes: int = 0  # freed on the GPU, but not reusable by the allocator
    rank_zero_loading_bytes: int = 0  # host memory that only rank 0 needs to load weights before they are sharded
    saved_bytes: int = 0  # weights and moments that this rank writes to a checkpoint


class ShardingStrategy(Protocol):
    """Computes the memory of the model states under one kind of sharding."""

    def compute_footprint(self, shape: ModelShape, world_size: int) -> ModelStateFootprint:
        """Return the memory of the model states on one rank."""


@dataclass(frozen=True)
class DdpStrategy:
    """DDP, where every rank holds the full model. Gradients always count, because gradient accumulation keeps them."""

    def compute_footprint(self, shape: ModelShape, world_size: int) -> ModelStateFootprint:
        """Return the memory of the model states on one rank, including the gradient buckets of more than one rank."""
        weights = shape.frozen_bytes + shape.buffer_bytes
        adapters = shape.trained_bytes if shape.has_adapters else 0
        resident_parts = (
            MemoryPart(WEIGHTS, weights + shape.trained_bytes - adapters),
            MemoryPart(REFERENCE, shape.resident_reference_bytes),
            MemoryPart(ADAPTERS, adapters),
            MemoryPart("gradients", shape.trained_bytes),
            MemoryPart("optimizer states", shape.optimizer_bytes),
        )
        buckets = MemoryPart("gradient buckets", shape.trained_bytes if world_size > 1 else 0)
        saved_bytes = (shape.trained_bytes + shape.optimizer_bytes) // world_size
        return ModelStateFootprint(resident_parts, forward_backward_parts=(buckets,), saved_bytes=saved_bytes)


@dataclass(frozen=True)
class RankLayout:
    """Layout of a job: world size, ranks per node, device and sharding of the model."""

    world_size: int
    ranks_per_node: int
    loader_workers_per_rank: int
    on_gpu: bool
    sharding: ShardingStrategy | None = None  # None: DDP
    copies_checkpoints: bool = False  # whether checkpoints are copied to host memory and written during training

    def compute_footprint(self, shape: ModelShape) -> ModelStateFootprint:
        """Return the memory of the model states on one rank."""
        return (self.sharding or DdpStrategy()).compute_footprint(shape, self.world_size)


def build_activation_parts(peak: ActivationMemory) -> tuple[MemoryPart, ...]:
    """Return the memory parts that exist only during a micro-batch."""
    return MemoryPart("activations", peak.activations), MemoryPart("logits and loss", peak.logits)


def break_down_rank_memory(shape: ModelShape, peak: ActivationMemory, layout: RankLayout) -> MemoryBreakdown:
    """Return the peak memory of one rank on its device, which is host memory on CPU."""
    footprint = layout.compute_footprint(shape)
    resident_parts = footprint.resident_parts
    if not layout.on_gpu:
        resident_parts += footprint.offloaded_parts
    forward_backward_parts = (*footprint.forward_backward_parts, *build_activation_parts(peak))
    allocated_parts = (*resident_parts, *max(forward_backward_parts, footprint.optimizer_step_parts, key=sum_bytes))
    gap_bytes = _UNUSABLE_LOGITS * peak.logits + footprint.fragmented_bytes
    return _drop_empty_parts(
        (*allocated_parts, *(_build_gpu_parts(allocated_parts, gap_bytes, layout) if layout.on_gpu else ()))
    )


def sum_bytes(parts: Iterable[MemoryPart]) -> int:
    """Return the total size of memory parts in bytes."""
    return sum(part.size for part in parts)


def break_down_node_memory(shape: ModelShape, rank: MemoryBreakdown, layout: RankLayout) -> MemoryBreakdown:
    """Return the peak host memory of the node with rank 0, while loading, training or publishing."""
    ranks, footprint = layout.ranks_per_node, layout.compute_footprint(shape)
    loaders = MemoryPart("data loaders", ranks * layout.loader_workers_per_rank * _LOADER_WORKER)
    checkpoint = MemoryPart("checkpoint being written", ranks * _count_copied_bytes(footprint, layout))
    if layout.on_gpu:
        processes, host_parts = MemoryPart("processes", ranks * _GPU_PROCESS), footprint.offloaded_parts
        offloaded = MemoryPart("offloaded", ranks * sum_bytes(host_parts))
        training: tuple[MemoryPart, ...] = (loaders, offloaded, checkpoint)
    else:
        processes = MemoryPart("processes", ranks * _CPU_PROCESS)
        host_parts = (*footprint.resident_parts, *footprint.offloaded_parts)
        training = (MemoryPart("ranks", ranks * rank.total), loaders, checkpoint)
    in_transit = ranks * shape.largest_weight_bytes  # each rank loads, or sends and receives, one tensor at a time
    weights = MemoryPart("weights", ranks * sum_bytes(part for part in host_parts if _contains_weights(part)))
    loading = (
        weights,
        MemoryPart("weights being loaded", in_transit + footprint.rank_zero_loading_bytes),
    )
    publishing = (weights, MemoryPart("published model", shape.published_bytes))
    return _drop_empty_parts((processes, *max(loading, training, publishing, key=sum_bytes)))


def rename_offloaded_parts(*parts: MemoryPart) -> tuple[MemoryPart, ...]:
    """Return the parts with the names of offloaded parts."""
    return tuple(MemoryPart(f"{_OFFLOADED}{part.name}", part.size) for part in parts)


def _count_copied_bytes(footprint: ModelStateFootprint, layout: RankLayout) -> int:
    """Return how much of a checkpoint a rank copies to host memory: all of it, or one file at a time from a GPU."""
    if layout.copies_checkpoints:
        return footprint.saved_bytes
    return min(footprint.saved_bytes, MAX_FILE_BYTES) if layout.on_gpu else 0


def _contains_weights(part: MemoryPart) -> bool:
    return part.name.removeprefix(_OFFLOADED) in (WEIGHTS, REFERENCE, ADAPTERS)


def _build_gpu_parts(allocated: Iterable[MemoryPart], gap_bytes: float, layout: RankLayout) -> tuple[MemoryPart, ...]:
    return (
        MemoryPart("CUDA context", _CUDA_CONTEXT),
        MemoryPart("NCCL buffers", _NCCL_BUFFERS if layout.world_size > 1 else 0),
        MemoryPart("fragmentation", int(gap_bytes + FRAGMENTATION * sum_bytes(allocated))),
    )


def _drop_empty_parts(parts: Iterable[MemoryPart]) -> MemoryBreakdown:
    return MemoryBreakdown(tuple(part for part in parts if part.size))
