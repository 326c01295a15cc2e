"""Tests of the work queue in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_operator.tasks.workqueue import (
    INITIAL_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    PASS_BURST,
    SECONDS_PER_PASS,
    QueueClosed,
    WorkQueue,
)
from testing.fakes.virtual_time import run_in_virtual_time


@dataclass
class PassLog:
    """Records the start time of each pass and the maximum number of concurrent passes per key."""

    starts: list[tuple[str, float]] = field(default_factory=list)
    max_concurrent: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)

    async def run_worker(self, queue: WorkQueue[str], *, pass_seconds: float = 1.0) -> None:
        """Run a worker whose passes take `pass_seconds` each."""
        try:
            while True:
                async with queue.next() as key:
                    self.starts.append((key, asyncio.get_running_loop().time()))
                    self._running[key] += 1
                    self.max_concurrent[key] = max(self.max_concurrent[key], self._running[key])
                    await asyncio.sleep(pass_seconds)
                    self._running[key] -= 1
        except QueueClosed:
            return


async def run_workers(
    queue: WorkQueue[str], log: PassLog, *, worker_count: int = 1, close_at_seconds: float, pass_seconds: float = 1.0
) -> None:
    tasks = [asyncio.create_task(log.run_worker(queue, pass_seconds=pass_seconds)) for _ in range(worker_count)]
    await asyncio.sleep(close_at_seconds - asyncio.get_running_loop().time())
    queue.close()
    await asyncio.gather(*tasks)


Fill = Callable[[WorkQueue[str]], object]


def process_in_virtual_time(
    fill: Fill, *, worker_count: int = 1, close_at_seconds: float = 20, pass_seconds: float = 1.0
) -> PassLog:
    """Fill a queue, process its keys with these workers, and return their passes."""

    async def scenario() -> PassLog:
        queue, log = WorkQueue[str](), PassLog()
        fill(queue)
        await run_workers(
            queue, log, worker_count=worker_count, close_at_seconds=close_at_seconds, pass_seconds=pass_seconds
        )
        return log

    return run_in_virtual_time(scenario())


def add(*keys: str) -> Fill:
    def fill(queue: WorkQueue[str]) -> None:
        for key in keys:
            queue.add(key)

    return fill


def add_after(*delays: float) -> Fill:
    def fill(queue: WorkQueue[str]) -> None:
        for delay in delays:
            queue.add_after("a", delay)

    return fill


def add_now_and_during_the_pass(queue: WorkQueue[str]) -> None:
    queue.add("a")
    asyncio.get_running_loop().call_at(0.5, queue.add, "a")


def add_now_and_later(queue: WorkQueue[str]) -> None:
    queue.add_after("a", 5)
    queue.add("a")


def add_and_remove(queue: WorkQueue[str]) -> None:
    queue.add("a")
    queue.add_after("a", 2)
    queue.remove("a")


@pytest.mark.parametrize(
    ("fill", "worker_count", "starts"),
    [
        pytest.param(add(*"aaaaa"), 1, [("a", 0.0)], id="a key added repeatedly is processed once"),
        pytest.param(add_now_and_during_the_pass, 2, [("a", 0.0), ("a", 1.0)], id="added during its pass: again"),
        pytest.param(add(*"cab"), 1, [("c", 0.0), ("a", 1.0), ("b", 2.0)], id="in order"),
        pytest.param(add(*"abc"), 2, [("a", 0.0), ("b", 0.0), ("c", 1.0)], id="different keys concurrently"),
        pytest.param(add_after(3, 5), 1, [("a", 3.0)], id="the earlier of two delayed adds, added first"),
        pytest.param(add_after(5, 3), 1, [("a", 3.0)], id="the earlier of two delayed adds, added last"),
        pytest.param(add_now_and_later, 1, [("a", 0.0), ("a", 5.0)], id="a delayed add delays no immediate one"),
        pytest.param(lambda queue: queue.retry("a", min_delay_seconds=7), 1, [("a", 7.0)], id="Retry-After"),
        pytest.param(add_and_remove, 1, [], id="a removed key is not processed"),
    ],
)
def test_passes_of_added_keys_start_in_time(fill: Fill, worker_count: int, starts: list[tuple[str, float]]) -> None:
    log = process_in_virtual_time(fill, worker_count=worker_count)

    assert log.starts == starts
    assert log.max_concurrent["a"] <= 1


def test_the_backoff_doubles_up_to_a_limit() -> None:
    async def scenario() -> list[float]:
        queue = WorkQueue[str]()
        return [queue.retry("a") for _ in range(40)]

    delays = run_in_virtual_time(scenario())
    for failures, delay in enumerate(delays):
        full_delay = min(MAX_BACKOFF_SECONDS, INITIAL_BACKOFF_SECONDS * 2**failures)
        assert full_delay / 2 <= delay <= full_delay
    assert len(set(delays)) > 20, "without jitter, all jobs would be retried at the same time"


def test_a_success_resets_the_backoff() -> None:
    async def scenario() -> float:
        queue = WorkQueue[str]()
        for _ in range(10):
            queue.retry("a")
        queue.reset_backoff("a")
        return queue.retry("a")

    assert run_in_virtual_time(scenario()) <= INITIAL_BACKOFF_SECONDS


def test_rate_limit_of_a_constantly_added_key_does_not_delay_other_keys() -> None:
    async def add_constantly(queue: WorkQueue[str]) -> None:
        while not queue.closed:
            queue.add("a")
            await asyncio.sleep(0.001)

    async def scenario() -> PassLog:
        queue, log = WorkQueue[str](), PassLog()
        adding = asyncio.create_task(add_constantly(queue))
        asyncio.get_running_loop().call_at(5.05, queue.add, "b")
        await run_workers(queue, log, close_at_seconds=20, pass_seconds=0.001)
        await adding
        return log

    starts = run_in_virtual_time(scenario()).starts
    passes = [at for key, at in starts if key == "a"]
    assert sum(at < 1 for at in passes) >= PASS_BURST
    assert len(passes) == pytest.approx(PASS_BURST + 20 / SECONDS_PER_PASS, abs=2)
    assert passes[-1] == pytest.approx(20, abs=1.1 * SECONDS_PER_PASS), "the key is slowed down, not starved"
    assert [at for key, at in starts if key == "b"] == pytest.approx([5.05], abs=0.01)


def test_the_token_bucket_refills_while_a_key_is_idle() -> None:
    async def add_burst(queue: WorkQueue[str]) -> None:
        for _ in range(PASS_BURST):
            queue.add("a")
            await asyncio.sleep(0.002)

    async def scenario() -> PassLog:
        queue, log = WorkQueue[str](), PassLog()
        refill_seconds = PASS_BURST * SECONDS_PER_PASS
        worker = asyncio.create_task(run_workers(queue, log, close_at_seconds=2 * refill_seconds, pass_seconds=0.001))
        await add_burst(queue)
        await asyncio.sleep(refill_seconds)
        await add_burst(queue)
        await worker
        return log

    assert len(run_in_virtual_time(scenario()).starts) == 2 * PASS_BURST


def test_closed_queue_finishes_running_passes_and_starts_no_new_ones() -> None:
    log = process_in_virtual_time(add(*"ab"), close_at_seconds=0.5, pass_seconds=3.0)

    assert log.starts == [("a", 0.0)]
    assert log._running["a"] == 0


def test_groups_take_turns_and_one_group_never_occupies_all_workers() -> None:
    async def run() -> list[str]:
        queue: WorkQueue[str] = WorkQueue(get_group=lambda key: key[0], max_per_group=2)
        log = PassLog()
        for key in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            queue.add(key)
        workers = [asyncio.create_task(log.run_worker(queue)) for _ in range(3)]
        await asyncio.sleep(10)
        queue.close()
        await asyncio.gather(*workers)
        assert [key for key, _ in log.starts[:3]] == ["a1", "b1", "c1"]
        queue = WorkQueue(get_group=lambda key: key[0], max_per_group=2)
        for key in ("a1", "a2", "a3"):
            queue.add(key)
        alone = PassLog()
        workers = [asyncio.create_task(alone.run_worker(queue)) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert len(alone.starts) == 2
        queue.add("b1")
        await asyncio.sleep(0.1)
        assert alone.starts[-1][0] == "b1"
        await asyncio.sleep(5)
        queue.close()
        await asyncio.gather(*workers)
        return sorted(key for key, _ in alone.starts)

    assert run_in_virtual_time(run()) == ["a1", "a2", "a3", "b1"]


def test_queueing_times_and_pass_durations_are_measured() -> None:
    async def scenario() -> tuple[int, float, float]:
        queue, log = WorkQueue[str](), PassLog()
        queue.add("a")
        queue.add("b")
        worker = asyncio.create_task(log.run_worker(queue, pass_seconds=100.0))
        await asyncio.sleep(30)
        metrics = len(queue), queue.oldest_wait_seconds(), queue.longest_pass_seconds()
        worker.cancel()
        return metrics

    assert run_in_virtual_time(scenario()) == (1, 30.0, 30.0)


def test_queue_is_stalled_if_no_worker_processes_a_queued_key() -> None:
    async def scenario() -> list[float]:
        queue = WorkQueue[str]()
        stalled = [queue.stalled_seconds()]
        queue.add("a")
        queue.add("b")
        await asyncio.sleep(40)
        stalled.append(queue.stalled_seconds())
        async with queue.next():
            await asyncio.sleep(25)
            stalled.append(queue.stalled_seconds())
        async with queue.next():
            stalled.append(queue.stalled_seconds())
        return stalled

    assert run_in_virtual_time(scenario()) == [0, 40, 25, 0]


def test_queueing_time_starts_when_the_key_is_first_added() -> None:
    waits: list[float] = []

    async def scenario() -> None:
        queue = WorkQueue[str](on_wait=waits.append)
        queue.add("a")
        asyncio.get_running_loop().call_at(2.0, queue.add, "a")
        await asyncio.sleep(3)
        await run_workers(queue, PassLog(), close_at_seconds=10)

    run_in_virtual_time(scenario())
    assert waits == [3.0]


Step = tuple[str, str, float]  # operation, key, delay in seconds
steps = st.lists(
    st.tuples(
        st.sampled_from(("add", "add_after", "retry", "wait")),
        st.sampled_from("abc"),
        st.floats(min_value=0, max_value=5, allow_nan=False),
    ),
    max_size=60,
)


@given(steps=steps, worker_count=st.integers(1, 4), pass_seconds=st.floats(min_value=0, max_value=3))
@settings(max_examples=200, deadline=None)
def test_every_add_causes_a_pass_and_passes_of_a_key_never_overlap(
    steps: list[Step], worker_count: int, pass_seconds: float
) -> None:
    expected: list[
        tuple[str, int, float]
    ] = []  # key, number of passes started earlier, latest time of the next pass without delays

    async def scenario() -> PassLog:
        queue, log = WorkQueue[str](), PassLog()
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(
            run_workers(queue, log, worker_count=worker_count, close_at_seconds=10_000.0, pass_seconds=pass_seconds)
        )
        for verb, key, amount in steps:
            now = loop.time()
            if verb == "add":
                queue.add(key)
                expected.append((key, len(log.starts), now))
            elif verb == "add_after":
                queue.add_after(key, amount)
                expected.append((key, len(log.starts), now + amount))
            elif verb == "retry":
                expected.append((key, len(log.starts), now + queue.retry(key, min_delay_seconds=amount)))
            else:
                await asyncio.sleep(amount)
        await running
        return log

    log = run_in_virtual_time(scenario())
    max_delay = (len(steps) + 3) * max(pass_seconds, 0.001) + SECONDS_PER_PASS * len(steps)
    for key, passes_before, due in expected:
        later = [start for k, start in log.starts[passes_before:] if k == key]
        assert later, f"no pass of {key} after it was added"
        assert later[0] <= due + max_delay
    assert all(count == 1 for count in log.max_concurrent.values())
