"""Test of the event loop with virtual time."""

import asyncio

from testing.fakes.virtual_time import run_in_virtual_time


async def collect_cancellations(number_of_tasks: int) -> list[int]:
    """Return the numbers of the tasks of a TaskGroup in the order in which they are cancelled."""
    cancelled: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def fail() -> None:
        raise ValueError

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(number_of_tasks):
                group.create_task(wait(number))
            await asyncio.sleep(1)
            group.create_task(fail())
    except* ValueError:
        pass
    return cancelled


def test_a_task_group_cancels_its_tasks_in_the_same_order_each_time() -> None:
    """asyncio keeps them in a set, in which they are ordered by their addresses if these are their hashes."""
    orders = [run_in_virtual_time(collect_cancellations(50)) for _ in range(3)]

    assert sorted(orders[0]) == list(range(50))
    assert orders[1:] == [orders[0]] * 2
