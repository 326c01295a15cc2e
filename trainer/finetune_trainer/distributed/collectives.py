"""The ranks of a job and what they do together. Their numbers come from torchrun's environment, read once."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from finetune_trainer.errors import InvalidSpec, TrainerError, WorldSizeMismatch

T = TypeVar("T")
_NO_LIMIT = timedelta(days=20)  # about the most that the store takes
_TURNS = itertools.count()


@dataclass(frozen=True)
class Ranks:
    """Who this process is among the others."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Ranks":
        return cls(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            world_size=int(env["WORLD_SIZE"]),
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size


def check_world_size(ranks: Ranks, *, promised: int) -> None:
    """Fewer ranks would train with another effective batch and nobody would notice."""
    if ranks.world_size != promised:
        raise WorldSizeMismatch(
            f"{ranks.world_size} ranks were started, but the job plans {promised}"
            " (numNodes x nprocPerNode); do not set torchrun's variables in the image or in spec.env"
        )


def choose_device(ranks: Ranks) -> torch.device:
    """The rank's own GPU, made current before anything is built on one; CPU where there are none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks.local_world_size > torch.cuda.device_count():
        raise InvalidSpec(
            f"spec.nprocPerNode is {ranks.local_world_size}, but the node gives {torch.cuda.device_count()} GPUs to"
            " this pod; each rank needs one: lower nprocPerNode or raise resources.limits"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def join_process_group(device: torch.device, *, timeout_seconds: int) -> None:
    """Ours before accelerate's, which would leave gloo at its default timeout."""
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def device_name(device: torch.device) -> str:
    """Of the GPU's model, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def on_rank_zero(action: Callable[[], T]) -> T:
    """What `action` gives on rank 0, on every rank; its TrainerError too, so that nobody waits for one that gave up.

    It may take as long as it likes: a collective in which the others wait would fail after spec.training.ddpTimeout,
    which a large checkpoint, or a result on its way to the Hub, may well exceed.
    """
    box: list[T | TrainerError | None] = [None]
    store, done = dist.distributed_c10d._get_default_store(), f"finetune/rank-zero/{next(_TURNS)}"
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except TrainerError as error:
            box[0] = error
        store.set(done, "")
    store.wait([done], _NO_LIMIT)
    dist.broadcast_object_list(box)
    if isinstance(box[0], TrainerError):
        raise box[0]
    return box[0]  # type: ignore[return-value]


def gather_on_rank_zero(mine: T) -> list[T]:
    """What every rank gave, by rank, on rank 0; nothing elsewhere."""
    gathered: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    return gathered or []  # type: ignore[return-value]


def gather(mine: T) -> list[T]:
    """What every rank gave, by rank, on every rank."""
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered  # type: ignore[return-value]


def gather_numbers(mine: tuple[float, ...], device: torch.device) -> list[tuple[float, ...]]:
    """What every rank gave, by rank, on every rank, in one collective."""
    numbers = torch.tensor(mine, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, numbers)
    return [tuple(each.tolist()) for each in gathered]


def sum_over_ranks(values: tuple[float, ...], device: torch.device) -> tuple[float, ...]:
    """Element by element, in one collective; whole numbers stay exact up to 2^53."""
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return tuple(summed.tolist())
