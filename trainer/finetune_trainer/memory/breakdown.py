"""Of what the memory of a rank and of a node is made up: plain sums over a model's shape."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from finetune_trainer.memory.fake_step import Live
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.memory.model_shape import ModelShape

ADAMW_STATES = 2  # mean and variance of every gradient, in the type of the weight
# The next four are what published measurements need beside tensors, on the safe side: docs/user-guide/memory.md.
_CUDA_CONTEXT = GIB  # kernels and the workspaces of cuBLAS and of attention
_NCCL_BUFFERS = int(0.4 * GIB)
FRAGMENTATION = 0.05  # of what is allocated: gaps between blocks
_SPARE_LOGITS = 1 / 6  # one copy in 16 bits: of blocks so large one that was freed seldom has the right length
_GPU_PROCESS = int(2.5 * GIB)  # of host memory: torch's and CUDA's libraries, pinned buffers
_CPU_PROCESS = int(0.8 * GIB)
_LOADER = int(0.2 * GIB)


@dataclass(frozen=True)
class Part:
    """Bytes with a name."""

    name: str
    size: int


@dataclass(frozen=True)
class Parts:
    """What lives in one memory at the moment when it holds most."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        return sum_up(self.parts)

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.size)


@dataclass(frozen=True)
class Footprint:
    """What a rank has of a model, and what a step adds to it beside activations."""

    held: tuple[Part, ...] = ()  # on its device, from step to step
    offloaded: tuple[Part, ...] = ()  # in host memory, from step to step
    computing: tuple[Part, ...] = ()  # in forward and backward
    updating: tuple[Part, ...] = ()  # while the optimizer works, when the activations are gone
    scattered: int = 0  # bytes on a GPU that were freed, but that the allocator can give to nothing else


class Spread(Protocol):
    """A way to divide a model among ranks."""

    def footprint(self, shape: ModelShape, ranks: int) -> Footprint:
        """Of one of so many."""


@dataclass(frozen=True)
class Whole:
    """Every rank has all of it (DDP). Gradients count as there in every moment, as with accumulation they are."""

    on_gpu: bool

    def footprint(self, shape: ModelShape, ranks: int) -> Footprint:
        """accelerate takes DDP, which copies gradients into buckets, for several GPUs, and on CPU always."""
        weights = shape.frozen_bytes + shape.buffer_bytes
        adapters = shape.trained_bytes if shape.adapted else 0
        held = (
            Part("weights", weights + shape.trained_bytes - adapters),
            Part("reference model", shape.reference_bytes),
            Part("adapters", adapters),
            Part("gradients", shape.trained_bytes),
            Part("optimizer states", ADAMW_STATES * shape.trained_bytes),
        )
        in_buckets = ranks > 1 or not self.on_gpu
        return Footprint(held, computing=(Part("gradient buckets", shape.trained_bytes if in_buckets else 0),))


@dataclass(frozen=True)
class Layout:
    """How ranks are spread, and on what they compute."""

    world_size: int
    ranks_per_node: int
    loaders_per_rank: int
    on_gpu: bool
    spread: Spread | None = None  # of the model; None: it is whole on every rank

    def footprint(self, shape: ModelShape) -> Footprint:
        return (self.spread or Whole(self.on_gpu)).footprint(shape, self.world_size)


def step_parts(live: Live) -> tuple[Part, ...]:
    """What comes and goes with a micro-batch."""
    return Part("activations", live.activations), Part("logits and loss", live.logits)


def rank_parts(shape: ModelShape, live: Live, layout: Layout) -> Parts:
    """All that a rank takes on its device, which is host memory without a GPU."""
    found = layout.footprint(shape)
    held = found.held if layout.on_gpu else (*found.held, *found.offloaded)
    allocated = (*held, *max((*found.computing, *step_parts(live)), found.updating, key=sum_up))
    gaps = _SPARE_LOGITS * live.logits + found.scattered
    return _without_empty((*allocated, *(_gpu_parts(allocated, gaps, layout) if layout.on_gpu else ())))


def sum_up(parts: Iterable[Part]) -> int:
    """Bytes."""
    return sum(part.size for part in parts)


def node_parts(shape: ModelShape, rank: Parts, layout: Layout) -> Parts:
    """Host memory of a node: every rank reads the weights into it before they go to its GPU."""
    ranks = layout.ranks_per_node
    loaders = Part("data loaders", ranks * layout.loaders_per_rank * _LOADER)
    if not layout.on_gpu:
        return _without_empty((Part("processes", ranks * _CPU_PROCESS), Part("ranks", ranks * rank.total), loaders))
    processes = Part("processes", ranks * _GPU_PROCESS)
    weights = Part("weights being loaded", ranks * (shape.frozen_bytes + shape.loaded_bytes + shape.reference_bytes))
    training = (loaders, Part("offloaded", ranks * sum_up(layout.footprint(shape).offloaded)))
    return _without_empty((processes, *max((weights,), training, key=sum_up)))


def _gpu_parts(allocated: Iterable[Part], gaps: float, layout: Layout) -> tuple[Part, ...]:
    return (
        Part("CUDA context", _CUDA_CONTEXT),
        Part("NCCL buffers", _NCCL_BUFFERS if layout.world_size > 1 else 0),
        Part("fragmentation", int(gaps + FRAGMENTATION * sum_up(allocated))),
    )


def _without_empty(parts: Iterable[Part]) -> Parts:
    return Parts(tuple(part for part in parts if part.size))
