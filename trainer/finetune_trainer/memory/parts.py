"""Of what the memory of a rank and of a node is made up: plain sums over a model's shape."""

from collections.abc import Iterable
from dataclasses import dataclass

from finetune_trainer.memory.gpus import GIB
from finetune_trainer.memory.shape import ModelShape
from finetune_trainer.memory.simulate import Live

ADAMW_STATES = 2  # mean and variance of every gradient, in the type of the weight
# The next four are what published measurements need beside tensors, on the safe side: docs/memory.md.
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
        return sum(part.size for part in self.parts)

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.size)


@dataclass(frozen=True)
class Layout:
    """How ranks are spread, and on what they compute."""

    world_size: int
    ranks_per_node: int
    loaders_per_rank: int
    on_gpu: bool


def held_parts(shape: ModelShape) -> tuple[Part, ...]:
    """What stays from step to step."""
    weights = shape.frozen_bytes + shape.buffer_bytes
    adapters = shape.trained_bytes if shape.frozen_bytes else 0
    return (
        Part("weights", weights + shape.trained_bytes - adapters),
        Part("reference model", shape.reference_bytes),
        Part("adapters", adapters),
        Part("gradients", shape.trained_bytes),
        Part("optimizer states", ADAMW_STATES * shape.trained_bytes),
    )


def step_parts(live: Live) -> tuple[Part, ...]:
    """What comes and goes with a micro-batch."""
    return Part("activations", live.activations), Part("logits and loss", live.logits)


def rank_parts(shape: ModelShape, live: Live, layout: Layout) -> Parts:
    """All that a rank takes on its device. Gradients count as there in every moment, as with accumulation they are."""
    allocated = (*held_parts(shape), Part("gradient buckets", bucket_bytes(shape, layout)), *step_parts(live))
    return _without_empty((*allocated, *(_gpu_parts(allocated, live, layout) if layout.on_gpu else ())))


def bucket_bytes(shape: ModelShape, layout: Layout) -> int:
    """DDP copies gradients into buckets of its own. accelerate takes DDP for several GPUs, and on CPU always."""
    return shape.trained_bytes if layout.world_size > 1 or not layout.on_gpu else 0


def node_parts(shape: ModelShape, rank: Parts, layout: Layout) -> Parts:
    """Host memory of a node: every rank reads the weights into it before they go to its GPU."""
    ranks = layout.ranks_per_node
    loaders = Part("data loaders", ranks * layout.loaders_per_rank * _LOADER)
    if not layout.on_gpu:
        return _without_empty((Part("processes", ranks * _CPU_PROCESS), Part("ranks", ranks * rank.total), loaders))
    processes = Part("processes", ranks * _GPU_PROCESS)
    weights = Part("weights being loaded", ranks * (shape.frozen_bytes + shape.trained_bytes + shape.reference_bytes))
    return _without_empty((processes, max(weights, loaders, key=lambda part: part.size)))


def _gpu_parts(allocated: Iterable[Part], live: Live, layout: Layout) -> tuple[Part, ...]:
    gaps = FRAGMENTATION * sum(part.size for part in allocated) + _SPARE_LOGITS * live.logits
    return (
        Part("CUDA context", _CUDA_CONTEXT),
        Part("NCCL buffers", _NCCL_BUFFERS if layout.world_size > 1 else 0),
        Part("fragmentation", int(gaps)),
    )


def _without_empty(parts: Iterable[Part]) -> Parts:
    return Parts(tuple(part for part in parts if part.size))
