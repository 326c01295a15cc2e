"""Wait for a condition that no event reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(
    predicate: Callable[[], object], *, goal: str, timeout_seconds: float = 60, interval_seconds: float = 0.2
) -> float:
    """Wait until the predicate returns something true; return the seconds that it took.

    Raises: TimeoutError that contains the goal.
    """
    started_at = time.monotonic()
    while not predicate():
        if time.monotonic() > started_at + timeout_seconds:
            raise TimeoutError(f"not within {timeout_seconds:.0f} s: {goal}")
        time.sleep(interval_seconds)
    return round(time.monotonic() - started_at, 1)


async def wait_in_event_loop(predicate: Callable[[], object], *, timeout_seconds: float = 60) -> None:
    """Wait until the predicate returns something true, while other tasks run. Raises TimeoutError."""
    async with asyncio.timeout(timeout_seconds):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
