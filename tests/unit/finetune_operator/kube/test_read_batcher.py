"""Tests of the combination of concurrent reads."""

import asyncio
from collections.abc import Mapping

import pytest

from finetune_operator.kube.read_batcher import MAX_BATCH_SIZE, MAX_WAIT_SECONDS, ReadBatcher


class Server:
    """Answers each request once `release` is set, and counts how often each key was written at that time."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, tuple[str, ...]]] = []
        self.request_arrived = asyncio.Event()
        self.release = asyncio.Event()
        self.versions: dict[str, int] = {}
        self.error: Exception | None = None

    async def fetch(self, group: str, keys: tuple[str, ...]) -> Mapping[str, int]:
        self.requests.append((group, keys))
        self.request_arrived.set()
        values = {key: self.versions.get(key, 0) for key in keys}  # the state when the request arrives
        await self.release.wait()
        if self.error is not None:
            raise self.error
        return values


async def start_reads(batcher: ReadBatcher[str, str, int], *keys: str, group: str = "a") -> list[asyncio.Task[int]]:
    reads = [asyncio.create_task(batcher.read(group, key)) for key in keys]
    for _ in range(3):  # until the request was sent, or the reads wait
        await asyncio.sleep(0)
    return reads


async def test_reads_during_a_request_share_the_next_one() -> None:
    server = Server()
    batcher = ReadBatcher(server.fetch)
    first = await start_reads(batcher, "x")
    server.versions["x"] = 1  # written after the first request, before the later reads
    later = await start_reads(batcher, "x", "y", "x")
    server.release.set()

    assert await asyncio.gather(*first) == [0]
    assert await asyncio.gather(*later) == [1, 0, 1]
    assert server.requests == [("a", ("x",)), ("a", ("x", "y"))]


async def test_reads_that_start_together_need_one_request() -> None:
    server = Server()
    server.release.set()
    reads = await start_reads(ReadBatcher(server.fetch), "x", "y", "z")

    assert await asyncio.gather(*reads) == [0, 0, 0]
    assert server.requests == [("a", ("x", "y", "z"))]


async def test_groups_do_not_wait_for_each_other() -> None:
    server = Server()
    batcher = ReadBatcher(server.fetch)
    reads = [*await start_reads(batcher, "x"), *await start_reads(batcher, "x", group="b")]

    assert server.requests == [("a", ("x",)), ("b", ("x",))]
    server.release.set()
    await asyncio.gather(*reads)


async def test_the_number_of_keys_of_a_request_is_limited() -> None:
    server = Server()
    server.release.set()
    keys = [f"k{number}" for number in range(MAX_BATCH_SIZE + 1)]
    await asyncio.gather(*await start_reads(ReadBatcher(server.fetch), *keys))

    assert [len(requested) for _, requested in server.requests] == [MAX_BATCH_SIZE, 1]


async def test_an_error_reaches_the_readers_of_its_request_only() -> None:
    server = Server()
    batcher = ReadBatcher(server.fetch)
    first, later = await start_reads(batcher, "x"), await start_reads(batcher, "y")
    server.error = ValueError("boom")
    server.release.set()
    with pytest.raises(ValueError, match="boom"):
        await first[0]
    server.error = None

    assert await later[0] == 0


async def test_a_request_without_a_response_delays_later_reads_by_a_second_at_most() -> None:
    server = Server()
    batcher = ReadBatcher(server.fetch)
    first = await start_reads(batcher, "x")
    started_at = asyncio.get_running_loop().time()
    later = asyncio.create_task(batcher.read("a", "y"))
    server.request_arrived.clear()
    await server.request_arrived.wait()

    assert asyncio.get_running_loop().time() - started_at >= MAX_WAIT_SECONDS / 2
    assert not first[0].done()
    server.release.set()
    assert await asyncio.gather(*first, later) == [0, 0]


async def test_a_cancelled_reader_does_not_affect_the_others() -> None:
    server = Server()
    cancelled, other = await start_reads(ReadBatcher(server.fetch), "x", "x")
    cancelled.cancel()
    server.release.set()

    assert await other == 0
