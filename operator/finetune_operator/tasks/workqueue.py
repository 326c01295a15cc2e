"""Work queue of job keys. A key is queued at most once and processed by at most one worker at a time."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

INITIAL_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 60.0
PASS_BURST = 50
SECONDS_PER_PASS = 0.2


class QueueClosed(Exception):
    """Raised by `next` once the queue is closed."""


class WorkQueue(Generic[Key]):
    """Deduplicating queue with delays, modelled on client-go; times are in seconds of the event loop's clock.

    Every add causes a pass that starts after the add. Of several delayed adds, the earliest one applies.
    A token bucket limits each key to a burst of `PASS_BURST` passes, then to one per `SECONDS_PER_PASS`. This
    bounds the load if two operators undo each other's writes, or if a bug requeues a key forever (decisions/109).
    """

    def __init__(
        self,
        *,
        on_wait: Callable[[float], None] | None = None,
        get_group: Callable[[Key], str] = lambda _: "",
        max_per_group: int | None = None,
    ) -> None:
        """Create a queue. Of several groups, that with the fewest running passes is served first.

        on_wait: receives the seconds that a key waited in the queue.
        max_per_group: how many keys of one group are processed at a time.
        """
        self._on_wait = on_wait
        self._get_group = get_group
        self._max_per_group = max_per_group
        self._ready: dict[Key, float] = {}  # key -> time of the add
        self._ready_by_group: dict[str, dict[Key, None]] = {}
        self._running: dict[Key, float] = {}  # key -> start time of the pass
        self._running_by_group: Counter[str] = Counter()
        self._added_while_running: dict[Key, float] = {}  # key -> time of the add; queued once the pass ends
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._bucket_full_at: dict[Key, float] = {}
        self._changed = asyncio.Event()
        self._last_start = 0.0  # of any pass
        self.closed = False

    def __len__(self) -> int:
        return len(self._ready) + len(self._added_while_running)

    def add(self, key: Key) -> None:
        """Queue the key for a pass that starts after this call."""
        now = _now()
        if key in self._running:
            self._added_while_running.setdefault(key, now)
        elif key not in self._ready:
            self._enqueue_or_throttle(key, added_at=now)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue the key after a delay, or earlier if an earlier delayed add is pending."""
        self._add_at(key, _now() + max(0.0, seconds))

    def retry(self, key: Key, *, min_delay_seconds: float = 0.0) -> float:
        """Queue the key after a backoff that doubles with every consecutive failure; return the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        jitter = random.uniform(0.5, 1.0)  # noqa: S311
        delay = min(MAX_BACKOFF_SECONDS, INITIAL_BACKOFF_SECONDS * 2.0 ** min(failures, 30)) * jitter
        delay = max(delay, min_delay_seconds)
        self.add_after(key, delay)
        return delay

    def reset_backoff(self, key: Key) -> None:
        """Reset the backoff of a key whose pass succeeded."""
        self._failures.pop(key, None)

    def remove(self, key: Key) -> None:
        """Remove the key, its pending adds and its state."""
        self._failures.pop(key, None)
        self._bucket_full_at.pop(key, None)
        self._take(key)
        self._added_while_running.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    @asynccontextmanager
    async def next(self) -> AsyncIterator[Key]:
        """Yield the key of its group that has waited longest; no other worker processes it until the block ends."""
        while (key := self._choose()) is None:
            if self.closed:
                raise QueueClosed
            self._changed.clear()
            await self._changed.wait()
        if self.closed:
            raise QueueClosed
        added_at = self._take(key) or 0.0
        now = self._last_start = self._running[key] = _now()
        self._bucket_full_at[key] = max(now, self._bucket_full_at.get(key, 0.0)) + SECONDS_PER_PASS
        group = self._get_group(key)
        self._running_by_group[group] += 1
        if self._on_wait is not None:
            self._on_wait(now - added_at)
        try:
            yield key
        finally:
            del self._running[key]
            self._running_by_group[group] -= 1
            if not self._running_by_group[group]:
                del self._running_by_group[group]
            if self._ready:
                self._changed.set()  # its group may have another running pass
            if (added_again_at := self._added_while_running.pop(key, None)) is not None:
                self._enqueue_or_throttle(key, added_at=added_again_at)

    def _choose(self) -> Key | None:
        """Return the next key; None if no key is ready whose group may have another running pass."""
        running, limit = self._running_by_group, self._max_per_group
        groups = [group for group in self._ready_by_group if limit is None or running[group] < limit]
        return next(iter(self._ready_by_group[min(groups, key=running.__getitem__)])) if groups else None

    def _take(self, key: Key) -> float | None:
        """Remove a key from the ready ones and return the time of its add; None if it is not ready."""
        added_at = self._ready.pop(key, None)
        if added_at is not None:
            group = self._get_group(key)
            keys = self._ready_by_group.pop(group)
            del keys[key]
            if keys:
                self._ready_by_group[group] = keys  # after the groups that have waited longer
        return added_at

    def close(self) -> None:
        """Stop yielding keys; running passes continue."""
        self.closed = True
        self._changed.set()

    def oldest_wait_seconds(self) -> float:
        """Return how long the oldest queued key has waited."""
        return max((_now() - added_at for added_at in self._ready.values()), default=0.0)

    def stalled_seconds(self) -> float:
        """Return for how long no pass has started although a key is queued."""
        oldest_add = min(self._ready.values(), default=None)
        return 0.0 if oldest_add is None else _now() - max(oldest_add, self._last_start)

    def longest_pass_seconds(self) -> float:
        """Return how long the longest current pass has been running."""
        return max((_now() - started_at for started_at in self._running.values()), default=0.0)

    def _enqueue_or_throttle(self, key: Key, *, added_at: float) -> None:
        token_at = self._bucket_full_at.get(key, 0.0) - (PASS_BURST - 1) * SECONDS_PER_PASS
        if token_at > _now():
            self._add_at(key, token_at)
        else:
            self._ready[key] = added_at
            self._ready_by_group.setdefault(self._get_group(key), {})[key] = None
            self._changed.set()

    def _add_at(self, key: Key, due_at: float) -> None:
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due_at:
                return
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_at(due_at, self._on_timer, key)

    def _on_timer(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)


def _now() -> float:
    return asyncio.get_running_loop().time()
