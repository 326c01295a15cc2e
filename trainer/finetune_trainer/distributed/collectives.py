"""Collective operations: gather, sum, and run an action on rank 0 only."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from finetune_trainer.errors import TrainerError
from finetune_trainer.storage_faults import raise_storage_faults

T = TypeVar("T")
NO_TIMEOUT = timedelta(days=20)  # the store rejects much longer timeouts
_CALL_NUMBERS = itertools.count()


def run_on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only, and return its result, or raise its TrainerError, on every rank (decisions/304).

    `action` has no time limit. The other ranks wait on the store, because a collective would fail after
    spec.training.ddpTimeout, which a large checkpoint or an upload to the Hub may exceed.
    """
    store, done_key = dist.distributed_c10d._get_default_store(), f"finetune/rank-zero/{next(_CALL_NUMBERS)}"
    result: T | TrainerError | None = None
    if dist.get_rank() == 0:
        result = return_error(action)
        store.set(done_key, "")
    store.wait([done_key], NO_TIMEOUT)
    outcome: T | TrainerError = broadcast_from_rank_zero(result)
    return raise_error(outcome)


def return_error(action: Callable[[], T]) -> T | TrainerError:
    """Return the result of `action`, or its TrainerError or storage fault, which other ranks may need to know."""
    try:
        with raise_storage_faults():
            return action()
    except TrainerError as error:
        return error


def raise_error(result: T | TrainerError) -> T:
    """Return the result, or raise it if it is a TrainerError."""
    if isinstance(result, TrainerError):
        raise result
    return result


def broadcast_from_rank_zero(result: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the result of rank 0 on every rank. group: None is the default group."""
    results = [result]
    dist.broadcast_object_list(results, src=0, group=group)
    return results[0]


def all_gather_objects(local_value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather one value per rank; return the values in rank order on every rank. group: None is the default group."""
    gathered_values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered_values, local_value, group=group)
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
