"""Applies a function to items in several processes, in the order of the items (decisions/528)."""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from finetune_supervisor.launch.child_process import die_with_parent
from finetune_trainer.data.worker_errors import to_sendable

Item = TypeVar("Item")
Result = TypeVar("Result")

_MIN_ITEMS = 1000  # fewer items are processed before all processes have started
_CHUNK_ITEMS = 64  # items per exchange between processes
_CHUNKS_PER_PROCESS = 3  # limits the memory for items in transit

_function: Callable[[Any], Any]  # of a pool's process; inherited, so that it needs no serialization


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], *, processes: int) -> Iterator[Result]:
    """Yield the results of the function; with few items or one process, the calling process computes them.

    The items and results must be serializable. Raises: errors of the function; RuntimeError if a process ends early.
    """
    iterator = iter(items)
    first_items = list(islice(iterator, _MIN_ITEMS))
    if processes <= 1 or len(first_items) < _MIN_ITEMS:
        yield from map(function, chain(first_items, iterator))
        return
    pool = ProcessPoolExecutor(processes, get_context("fork"), initializer=_start_process, initargs=(function,))
    try:
        yield from _map_chunks(pool, chain(first_items, iterator), max_pending=_CHUNKS_PER_PROCESS * processes)
    except BrokenProcessPool as error:
        members = tuple((pool._processes or {}).values())
        pool.shutdown()  # waits until the members have ended
        raise RuntimeError(f"a worker that tokenises rows {_describe_end(members)}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _map_chunks(pool: ProcessPoolExecutor, items: Iterator[Any], *, max_pending: int) -> Iterator[Any]:
    pending: deque[Future[list[Any]]] = deque()
    while chunk := tuple(islice(items, _CHUNK_ITEMS)):
        pending.append(pool.submit(_process_chunk, chunk))
        if len(pending) >= max_pending:
            yield from pending.popleft().result()
    while pending:
        yield from pending.popleft().result()


def _describe_end(members: Iterable[BaseProcess]) -> str:
    """Describe how the first member ended; the pool then sends SIGTERM to the others."""
    codes = [member.exitcode for member in members if member.exitcode]
    code = next((code for code in codes if code != -signal.SIGTERM), -signal.SIGTERM)
    return f"exited with code {code}" if code > 0 else f"was killed by signal: {signal.strsignal(-code)}".lower()


def _start_process(function: Callable[[Any], Any]) -> None:
    global _function
    die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the tokenizer would compete with the other processes
    _function = function


def _process_chunk(chunk: tuple[Any, ...]) -> list[Any]:
    try:
        return [_function(item) for item in chunk]
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        raise to_sendable(error)  # noqa: B904  its traceback is kept
