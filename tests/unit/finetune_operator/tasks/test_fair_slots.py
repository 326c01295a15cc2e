"""Tests of the fair distribution of slots between namespaces."""

import asyncio

import pytest

from finetune_operator.tasks.fair_slots import FairSlots


async def start(slots: FairSlots, namespace: str, order: list[str]) -> tuple[asyncio.Task[None], asyncio.Event]:
    release = asyncio.Event()

    async def hold() -> None:
        async with slots.hold(namespace):
            order.append(namespace)
            await release.wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    return task, release


async def test_one_namespace_never_holds_the_last_slot() -> None:
    slots, order = FairSlots(3), list[str]()
    tasks = [await start(slots, "a", order) for _ in range(5)]
    assert order == ["a", "a"]
    other, release = await start(slots, "b", order)
    assert order == ["a", "a", "b"]
    for _, each in (*tasks, (other, release)):
        each.set()
    await asyncio.gather(other, *(task for task, _ in tasks))
    assert order.count("a") == 5


async def test_a_free_slot_goes_to_the_namespace_that_holds_fewest() -> None:
    slots, order = FairSlots(2), list[str]()
    first, release = await start(slots, "a", order)
    second, release_second = await start(slots, "b", order)
    waiting = [await start(slots, namespace, order) for namespace in ("a", "a", "c")]
    release_second.set()
    await second
    await asyncio.sleep(0)
    assert order == ["a", "b", "c"]
    for _, each in (*waiting, (first, release)):
        each.set()
    await asyncio.gather(first, *(task for task, _ in waiting))


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_cancelled_wait_loses_no_slot(is_granted: bool) -> None:
    slots, order = FairSlots(1), list[str]()
    first, release = await start(slots, "a", order)
    waiting, _ = await start(slots, "b", order)
    if is_granted:
        release.set()
        await first
    waiting.cancel()
    await asyncio.wait((waiting,))
    release.set()
    await first
    async with asyncio.timeout(1), slots.hold("c"):
        pass
