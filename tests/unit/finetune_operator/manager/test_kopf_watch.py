"""Tests of the errors of the event loop at the end of the process."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from kopf._cogs.clients import watching

from finetune_operator.manager.kopf_watch import WATCH_GENERATORS, handle_loop_error


@contextlib.asynccontextmanager
async def streaming_block() -> AsyncIterator[None]:
    """Behave as the function of kopf when its generator is closed within an event."""
    try:
        yield
    except GeneratorExit:
        yield


async def infinite_watch() -> AsyncIterator[int]:
    async with streaming_block():
        yield 1


async def another_generator() -> AsyncIterator[int]:
    try:
        yield 1
    except GeneratorExit:
        yield 2


@pytest.mark.parametrize(("generator", "errors"), [(infinite_watch, 0), (another_generator, 1)])
def test_only_the_watch_generators_of_kopf_may_fail_at_the_end(
    generator: type[AsyncIterator[int]], errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    unfinished = []

    async def leave_generator_open() -> None:
        asyncio.get_running_loop().set_exception_handler(handle_loop_error)
        iterator = generator()
        unfinished.append(iterator)
        await anext(iterator)

    asyncio.run(leave_generator_open())

    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == errors


def test_kopf_has_these_generators() -> None:
    assert all(hasattr(watching, name) for name in WATCH_GENERATORS)
