"""Tests the order, the errors and the processes of the pool that tokenises rows."""

import os
import signal
from collections.abc import Iterator
from itertools import count
from multiprocessing import active_children
from typing import Any

import pytest

from finetune_trainer.data import process_pool
from finetune_trainer.data.process_pool import map_in_order
from finetune_trainer.data.worker_errors import UnpicklableError
from finetune_trainer.errors import ChatTemplateError, DatasetError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_MIN_ITEMS", 5)
    monkeypatch.setattr(process_pool, "_CHUNK_ITEMS", 2)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 6, 101])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_results_are_in_the_order_of_the_items(size: int, processes: int) -> None:
    assert list(map_in_order(lambda item: item * 2, iter(range(size)), processes=processes)) == list(
        range(0, 2 * size, 2)
    )


@pytest.mark.parametrize(("size", "processes", "is_parallel"), [(101, 2, True), (4, 2, False), (101, 1, False)])
def test_other_processes_compute_many_items(size: int, processes: int, is_parallel: bool) -> None:
    ids = set(map_in_order(lambda _: os.getpid(), range(size), processes=processes))

    assert (os.getpid() in ids) != is_parallel
    assert not active_children(), "the processes end"


@pytest.mark.parametrize("error", [DatasetError("rows.jsonl line 3: no messages"), ChatTemplateError("no template")])
def test_errors_can_be_results(error: Exception) -> None:
    *_, last = map_in_order(lambda item: error if item == 100 else item, range(101), processes=2)

    assert type(last) is type(error)
    assert str(last) == str(error)


def raise_key_error(item: int) -> Any:
    raise KeyError(item)


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(KeyError, match="0"):
        list(map_in_order(raise_key_error, range(101), processes=2))
    assert not active_children()


def test_an_error_of_a_library_that_is_no_exception_keeps_its_message() -> None:
    class PanicException(BaseException):  # libraries in Rust use this name
        pass

    def panic(_: int) -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(UnpicklableError, match="index out of bounds") as raised:
        list(map_in_order(panic, range(101), processes=2))
    assert type(raised.value).__name__ == "PanicException"


def test_a_killed_process_is_an_error_that_the_operator_recognises() -> None:
    def kill_process(item: int) -> int:
        if item == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(RuntimeError, match="killed by signal: killed"):
        list(map_in_order(kill_process, range(101), processes=2))


def test_few_items_are_in_transit() -> None:
    """A data set may be larger than memory."""
    read: list[int] = []

    def read_items() -> Iterator[int]:
        for item in count():
            read.append(item)
            yield item

    results = map_in_order(lambda item: item, read_items(), processes=2)
    for _ in range(50):
        next(results)

    assert len(read) <= 50 + 2 * 2 * (process_pool._CHUNKS_PER_PROCESS + 1)
    results.close()  # type: ignore[attr-defined]
    assert not active_children()
