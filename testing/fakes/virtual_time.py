"""Event loop with virtual time: when all tasks wait, its clock jumps to the next timer.

It supports timers and tasks only, not sockets or other threads. The same program runs in the same order each time.
"""

import asyncio
import itertools
import selectors
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose time starts at 0 and advances only while all tasks wait."""

    def __init__(self) -> None:
        self._now = 0.0
        self._task_numbers = itertools.count()
        super().__init__(_TimeJumpSelector(self))
        self.set_task_factory(NumberedTask)

    def number_task(self) -> int:
        """Return the number of the next task."""
        return next(self._task_numbers)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._now += seconds


class NumberedTask(asyncio.Task[Any]):
    """Task whose hash is its number rather than its address, because a TaskGroup cancels its tasks in set order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        context: Context | None = None,
    ) -> None:
        assert isinstance(loop, VirtualTimeLoop)
        self._number = loop.number_task()
        super().__init__(coroutine, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number


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
