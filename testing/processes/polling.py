"""Waiting for a condition that no event reports."""

import asyncio
from collections.abc import Callable


async def wait_until(condition: Callable[[], object], *, timeout_seconds: float = 60) -> None:
    """Poll until the condition is true. Raises TimeoutError if it is not true in time."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
