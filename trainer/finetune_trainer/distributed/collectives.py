"""Collective operations: gather, sum, and run an action on rank 0 only."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from finetune_trainer.errors import TrainerError

T = TypeVar("T")
_NO_TIMEOUT = timedelta(days=20)  # the store rejects much longer timeouts
_CALL_NUMBERS = itertools.count()


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


def gather_on_rank_zero(local_value: T) -> list[T]:
    """Gather one value per rank; return the values in rank order on rank 0, and an empty list on other ranks."""
    gathered_values: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local_value, gathered_values)
    return gathered_values or []  # type: ignore[return-value]


def all_gather_objects(local_value: T) -> list[T]:
    """Gather one value per rank; return the values in rank order on every rank."""
    gathered_values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered_values, local_value)
    return gathered_values  # type: ignore[return-value]


def all_gather_numbers(local_numbers: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Gather a tuple of numbers per rank in one collective; return the tuples in rank order on every rank.

    The numbers are exchanged in host memory, so that the GPU is not synchronized.
    """
    numbers = torch.tensor(local_numbers, dtype=torch.float64)
    gathered_numbers = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered_numbers, numbers)
    return [tuple(rank_numbers.tolist()) for rank_numbers in gathered_numbers]


def sum_over_ranks(local_numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Return the elementwise sum over all ranks, computed by one collective; integers are exact up to 2**53.

    The numbers are exchanged in host memory, so that the GPU is not synchronized.
    """
    sums = torch.tensor(local_numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return tuple(sums.tolist())
