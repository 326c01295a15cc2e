"""Event loop with virtual time: when all tasks wait, its clock jumps to the next timer.

It supports timers and tasks only, not sockets or other threads.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose time starts at 0 and advances only while all tasks wait."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_TimeJumpSelector(self))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._now += seconds


class _TimeJumpSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: all tasks wait and no timer is set")
        if timeout:
            self._loop.jump(timeout)
        return []


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine like asyncio.run, but in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
