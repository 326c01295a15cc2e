"""Ranks, the process group and its collectives. Rank numbers come from torchrun's environment variables."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from finetune_trainer.errors import InvalidSpec, TrainerError, WorldSizeMismatch

T = TypeVar("T")
_NO_TIMEOUT = timedelta(days=20)  # about the longest timeout that the store accepts
_CALL_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Ranks:
    """Rank, local rank and world sizes of this process, as torch.distributed defines them."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Ranks":
        """Read the variables that torchrun sets."""
        return cls(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            world_size=int(env["WORLD_SIZE"]),
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """The number of nodes of the job."""
        return self.world_size // self.local_world_size


def check_world_size(ranks: Ranks, *, planned: int) -> None:
    """Raise WorldSizeMismatch unless as many ranks run as planned: other counts change the effective batch."""
    if ranks.world_size != planned:
        raise WorldSizeMismatch(
            f"{ranks.world_size} ranks were started, but the job plans {planned}"
            " (numNodes x nprocPerNode); do not set torchrun's variables in the image or in spec.env"
        )


def choose_device(ranks: Ranks) -> torch.device:
    """Return the GPU of this rank and make it the current device; the CPU if there are no GPUs.

    Raises InvalidSpec if there are more ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks.local_world_size > torch.cuda.device_count():
        raise InvalidSpec(
            f"spec.nprocPerNode is {ranks.local_world_size}, but the pod has {torch.cuda.device_count()} GPUs;"
            " each rank needs one: lower nprocPerNode or raise resources.limits"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def init_process_group(device: torch.device, *, timeout_seconds: int) -> None:
    """Initialise the default process group; done before accelerate does, which ignores the timeout for gloo."""
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def destroy_process_group() -> None:
    """Destroy the default process group if it was initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run_on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only, and return its result, or raise its TrainerError, on every rank (decisions/304).

    `action` has no time limit. The other ranks wait on the store, because a collective would fail after
    spec.training.ddpTimeout, which a large checkpoint or an upload to the Hub may exceed.
    """
    result: list[T | TrainerError | None] = [None]
    store, done_key = dist.distributed_c10d._get_default_store(), f"finetune/rank-zero/{next(_CALL_NUMBERS)}"
    if dist.get_rank() == 0:
        try:
            result[0] = action()
        except TrainerError as error:
            result[0] = error
        store.set(done_key, "")
    store.wait([done_key], _NO_TIMEOUT)
    dist.broadcast_object_list(result)
    if isinstance(result[0], TrainerError):
        raise result[0]
    return result[0]  # type: ignore[return-value]


def gather_on_rank_zero(local: T) -> list[T]:
    """Return the values of all ranks by rank on rank 0, and an empty list elsewhere."""
    gathered: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local, gathered)
    return gathered or []  # type: ignore[return-value]


def all_gather_objects(local: T) -> list[T]:
    """Return the values of all ranks by rank, on every rank."""
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return gathered  # type: ignore[return-value]


def all_gather_numbers(local: tuple[float, ...], device: torch.device) -> list[tuple[float, ...]]:
    """Return the numbers of all ranks by rank, on every rank, in one collective."""
    numbers = torch.tensor(local, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, numbers)
    return [tuple(each.tolist()) for each in gathered]


def sum_over_ranks(local: tuple[float, ...], device: torch.device) -> tuple[float, ...]:
    """Return the elementwise sum over all ranks, in one collective; integers are exact up to 2**53."""
    summed = torch.tensor(local, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return tuple(summed.tolist())
