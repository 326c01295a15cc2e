"""Keys that wait for a pass: each at most once in line, and never two passes of one key at a time."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 60.0
PASSES_AT_ONCE = 50
SECONDS_PER_PASS = 0.2


class QueueClosed(Exception):
    """No more keys are handed out."""


class WorkQueue(Generic[Key]):
    """A coalescing queue with delays; times are seconds of the running loop's clock.

    After every add a pass begins that has not begun before it. Of several delayed adds the earliest counts.
    A key that never rests gets `PASSES_AT_ONCE`, then one each `SECONDS_PER_PASS` (a token bucket): two operators that
    see different things and undo each other's writes, or a bug of ours, cost the API server little and others nothing.
    """

    def __init__(self, *, on_wait: Callable[[float], None] | None = None) -> None:
        self._on_wait = on_wait
        self._ready: OrderedDict[Key, float] = OrderedDict()  # in line, since when
        self._running: dict[Key, float] = {}
        self._again: dict[Key, float] = {}  # added while running: goes in line once the pass is over
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._rested: dict[Key, float] = {}  # when the bucket is full again
        self._changed = asyncio.Event()
        self.closed = False

    def __len__(self) -> int:
        return len(self._ready) + len(self._again)

    def add(self, key: Key) -> None:
        """Ask for a pass that begins after now."""
        now = _now()
        if key in self._running:
            self._again.setdefault(key, now)
        elif key not in self._ready:
            self._line_up(key, since=now)

    def add_after(self, key: Key, seconds: float) -> None:
        """Ask for a pass at a later time, or earlier if one was asked for earlier."""
        self._add_at(key, _now() + max(0.0, seconds))

    def retry(self, key: Key, *, at_least: float = 0.0) -> float:
        """Ask again after a pause that doubles with every failure in a row; returns the pause."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 30)) * random.uniform(0.5, 1.0)  # noqa: S311
        pause = max(pause, at_least)
        self.add_after(key, pause)
        return pause

    def succeeded(self, key: Key) -> None:
        """The next failure is a first one again."""
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        """Nothing more is asked of this key, and nothing is remembered of it."""
        self._failures.pop(key, None)
        self._rested.pop(key, None)
        self._ready.pop(key, None)
        self._again.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    @asynccontextmanager
    async def next(self) -> AsyncIterator[Key]:
        """The key that waited longest; it is this caller's alone until the block ends."""
        while not self._ready:
            if self.closed:
                raise QueueClosed
            self._changed.clear()
            await self._changed.wait()
        if self.closed:
            raise QueueClosed
        key, since = self._ready.popitem(last=False)
        now = self._running[key] = _now()
        self._rested[key] = max(now, self._rested.get(key, 0.0)) + SECONDS_PER_PASS
        if self._on_wait is not None:
            self._on_wait(now - since)
        try:
            yield key
        finally:
            del self._running[key]
            if (asked := self._again.pop(key, None)) is not None:
                self._line_up(key, since=asked)

    def close(self) -> None:
        """Hand out no more keys; passes that run go on."""
        self.closed = True
        self._changed.set()

    def oldest_wait_seconds(self) -> float:
        """How long the first in line has waited."""
        return max((_now() - since for since in self._ready.values()), default=0.0)

    def longest_pass_seconds(self) -> float:
        """How long the slowest running pass has taken so far."""
        return max((_now() - since for since in self._running.values()), default=0.0)

    def _line_up(self, key: Key, *, since: float) -> None:
        due = self._rested.get(key, 0.0) - (PASSES_AT_ONCE - 1) * SECONDS_PER_PASS
        if due > _now():
            self._add_at(key, due)
        else:
            self._ready[key] = since
            self._changed.set()

    def _add_at(self, key: Key, due: float) -> None:
        waiting = self._timers.get(key)
        if waiting is not None:
            if waiting.when() <= due:
                return
            waiting.cancel()
        self._timers[key] = asyncio.get_running_loop().call_at(due, self._fire, key)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)


def _now() -> float:
    return asyncio.get_running_loop().time()
