"""The queue under a virtual clock: what is added gets its pass, alone, in time."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_operator.controller.workqueue import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PASSES_AT_ONCE,
    SECONDS_PER_PASS,
    QueueClosed,
    WorkQueue,
)
from testing.fakes.virtual_time import run_in_virtual_time


@dataclass
class Log:
    """When passes of which key began and ended."""

    began: list[tuple[str, float]] = field(default_factory=list)
    most_at_once: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)

    async def work(self, queue: WorkQueue[str], *, seconds: float = 1.0) -> None:
        """A worker whose passes take a while."""
        try:
            while True:
                async with queue.next() as key:
                    self.began.append((key, asyncio.get_running_loop().time()))
                    self._running[key] += 1
                    self.most_at_once[key] = max(self.most_at_once[key], self._running[key])
                    await asyncio.sleep(seconds)
                    self._running[key] -= 1
        except QueueClosed:
            return


async def run_workers(queue: WorkQueue[str], log: Log, *, workers: int = 1, until: float, seconds: float = 1.0) -> None:
    tasks = [asyncio.create_task(log.work(queue, seconds=seconds)) for _ in range(workers)]
    await asyncio.sleep(until - asyncio.get_running_loop().time())
    queue.close()
    await asyncio.gather(*tasks)


def test_a_key_added_many_times_gets_one_pass() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        for _ in range(5):
            queue.add("a")
        await run_workers(queue, log, until=10)
        return log

    assert run_in_virtual_time(story()).began == [("a", 0.0)]


def test_an_add_during_a_pass_gets_another_pass_after_it() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        queue.add("a")
        asyncio.get_running_loop().call_at(0.5, queue.add, "a")
        await run_workers(queue, log, workers=2, until=10)
        return log

    log = run_in_virtual_time(story())
    assert log.began == [("a", 0.0), ("a", 1.0)]
    assert log.most_at_once["a"] == 1


def test_keys_are_served_in_the_order_they_came() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        for key in "cab":
            queue.add(key)
        await run_workers(queue, log, until=10)
        return log

    assert [key for key, _ in run_in_virtual_time(story()).began] == ["c", "a", "b"]


def test_workers_run_different_keys_at_the_same_time() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        for key in "abc":
            queue.add(key)
        await run_workers(queue, log, workers=2, until=10)
        return log

    assert run_in_virtual_time(story()).began == [("a", 0.0), ("b", 0.0), ("c", 1.0)]


@pytest.mark.parametrize("delays", [pytest.param((3, 5), id="earlier first"), pytest.param((5, 3), id="later first")])
def test_of_two_delayed_adds_the_earlier_counts(delays: tuple[float, float]) -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        for delay in delays:
            queue.add_after("a", delay)
        await run_workers(queue, log, until=10)
        return log

    assert run_in_virtual_time(story()).began == [("a", 3.0)]


def test_a_delayed_add_does_not_hold_up_an_immediate_one() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        queue.add_after("a", 5)
        queue.add("a")
        await run_workers(queue, log, until=10)
        return log

    assert run_in_virtual_time(story()).began == [("a", 0.0), ("a", 5.0)]


def test_pauses_between_retries_double_up_to_a_limit() -> None:
    async def story() -> list[float]:
        queue = WorkQueue[str]()
        return [queue.retry("a") for _ in range(40)]

    pauses = run_in_virtual_time(story())
    for failures, pause in enumerate(pauses):
        full = min(LONGEST_PAUSE, FIRST_PAUSE * 2**failures)
        assert full / 2 <= pause <= full
    assert len(set(pauses)) > 20, "without jitter, all jobs would come back at the same time"


def test_a_retry_is_not_earlier_than_the_server_asked() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        queue.retry("a", at_least=7)
        await run_workers(queue, log, until=20)
        return log

    assert run_in_virtual_time(story()).began == [("a", 7.0)]


def test_success_starts_the_pauses_afresh() -> None:
    async def story() -> float:
        queue = WorkQueue[str]()
        for _ in range(10):
            queue.retry("a")
        queue.succeeded("a")
        return queue.retry("a")

    assert run_in_virtual_time(story()) <= FIRST_PAUSE


def test_a_forgotten_key_gets_no_pass() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        queue.add("a")
        queue.add_after("a", 2)
        queue.forget("a")
        await run_workers(queue, log, until=10)
        return log

    assert run_in_virtual_time(story()).began == []


def test_a_key_that_never_rests_gets_its_share_and_the_others_theirs() -> None:
    async def insist(queue: WorkQueue[str]) -> None:
        while not queue.closed:
            queue.add("a")
            await asyncio.sleep(0.001)

    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        insisting = asyncio.create_task(insist(queue))
        asyncio.get_running_loop().call_at(5.05, queue.add, "b")
        await run_workers(queue, log, until=20, seconds=0.001)
        await insisting
        return log

    began = run_in_virtual_time(story()).began
    passes = [at for key, at in began if key == "a"]
    assert sum(at < 1 for at in passes) >= PASSES_AT_ONCE
    assert len(passes) == pytest.approx(PASSES_AT_ONCE + 20 / SECONDS_PER_PASS, abs=2)
    assert passes[-1] == pytest.approx(20, abs=1.1 * SECONDS_PER_PASS), "it is slowed down, not left out"
    assert [at for key, at in began if key == "b"] == pytest.approx([5.05], abs=0.01)


def test_a_key_that_rested_may_hurry_again() -> None:
    async def hurry(queue: WorkQueue[str]) -> None:
        for _ in range(PASSES_AT_ONCE):
            queue.add("a")
            await asyncio.sleep(0.002)

    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        rest = PASSES_AT_ONCE * SECONDS_PER_PASS
        worker = asyncio.create_task(run_workers(queue, log, until=2 * rest, seconds=0.001))
        await hurry(queue)
        await asyncio.sleep(rest)
        await hurry(queue)
        await worker
        return log

    assert len(run_in_virtual_time(story()).began) == 2 * PASSES_AT_ONCE


def test_a_closed_queue_lets_passes_finish_and_begins_none() -> None:
    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        queue.add("a")
        queue.add("b")
        await run_workers(queue, log, until=0.5, seconds=3.0)
        return log

    log = run_in_virtual_time(story())
    assert log.began == [("a", 0.0)]
    assert log._running["a"] == 0


def test_figures_tell_who_waits_and_what_is_stuck() -> None:
    async def story() -> tuple[int, float, float]:
        queue, log = WorkQueue[str](), Log()
        queue.add("a")
        queue.add("b")
        worker = asyncio.create_task(log.work(queue, seconds=100.0))
        await asyncio.sleep(30)
        figures = len(queue), queue.oldest_wait_seconds(), queue.longest_pass_seconds()
        worker.cancel()
        return figures

    assert run_in_virtual_time(story()) == (1, 30.0, 30.0)


def test_the_wait_is_measured_from_the_first_add() -> None:
    waits: list[float] = []

    async def story() -> None:
        queue = WorkQueue[str](on_wait=waits.append)
        queue.add("a")
        asyncio.get_running_loop().call_at(2.0, queue.add, "a")
        await asyncio.sleep(3)
        await run_workers(queue, Log(), until=10)

    run_in_virtual_time(story())
    assert waits == [3.0]


Step = tuple[str, str, float]  # verb, key, seconds
steps = st.lists(
    st.tuples(
        st.sampled_from(("add", "add_after", "retry", "wait")),
        st.sampled_from("abc"),
        st.floats(min_value=0, max_value=5, allow_nan=False),
    ),
    max_size=60,
)


@given(steps=steps, workers=st.integers(1, 4), seconds=st.floats(min_value=0, max_value=3))
@settings(max_examples=200, deadline=None)
def test_every_add_is_followed_by_a_pass_and_no_key_has_two_at_once(
    steps: list[Step], workers: int, seconds: float
) -> None:
    asked: list[tuple[str, int, float]] = []  # key, passes that had begun before, when the next is due

    async def story() -> Log:
        queue, log = WorkQueue[str](), Log()
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(run_workers(queue, log, workers=workers, until=10_000.0, seconds=seconds))
        for verb, key, amount in steps:
            now = loop.time()
            if verb == "add":
                queue.add(key)
                asked.append((key, len(log.began), now))
            elif verb == "add_after":
                queue.add_after(key, amount)
                asked.append((key, len(log.began), now + amount))
            elif verb == "retry":
                asked.append((key, len(log.began), now + queue.retry(key, at_least=amount)))
            else:
                await asyncio.sleep(amount)
        await running
        return log

    log = run_in_virtual_time(story())
    longest_line = (len(steps) + 3) * max(seconds, 0.001) + SECONDS_PER_PASS * len(steps)
    for key, passes_before, due in asked:
        later = [began for k, began in log.began[passes_before:] if k == key]
        assert later, f"no pass of {key} after it was asked for"
        assert later[0] <= due + longest_line
    assert all(count == 1 for count in log.most_at_once.values())
