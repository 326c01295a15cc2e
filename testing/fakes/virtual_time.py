"""An event loop whose clock jumps to the next timer when there is nothing to do, so that waiting costs nothing.

For code that waits on timers and tasks only: there are no sockets, and nothing comes from other threads.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 and moves only while everybody waits."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: everybody waits and no timer is set")
        if timeout:
            self._loop.jump(timeout)
        return []


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run, but at once."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
