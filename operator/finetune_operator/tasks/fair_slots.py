"""Limits concurrent requests, and shares the limit between namespaces."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Semaphore whose free slots go to the namespace that holds the fewest; of equal ones, to the first that waits.

    One namespace never holds the last slot, so that requests which take long there, for example because of an admission
    webhook, do not block the others.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._limit_per_namespace = max(1, limit - 1)
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by namespace, in the order of their first wait

    @asynccontextmanager
    async def hold(self, namespace: str) -> AsyncIterator[None]:
        """Hold a slot on behalf of a namespace; an empty name stands for requests of the whole cluster."""
        if self._free and not self._waiting.get(namespace) and self._may_hold(namespace):
            self._take(namespace)
        else:
            await self._wait(namespace)
        try:
            yield
        finally:
            self._free += 1
            self._held[namespace] -= 1
            if not self._held[namespace]:
                del self._held[namespace]
            self._grant()

    async def _wait(self, namespace: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted and cancelled in the same turn of the event loop
                self._free += 1
                self._held[namespace] -= 1
                self._grant()
            raise

    def _grant(self) -> None:
        """Give the free slots to waiting namespaces."""
        while self._free:
            candidates = [namespace for namespace in self._waiting if self._may_hold(namespace)]
            if not candidates:
                return
            namespace = min(candidates, key=self._held.__getitem__)
            waiting = self._waiting.pop(namespace)
            future = waiting.popleft()
            if waiting:
                self._waiting[namespace] = waiting
            if not future.cancelled():
                self._take(namespace)
                future.set_result(None)

    def _may_hold(self, namespace: str) -> bool:
        return self._held[namespace] < self._limit_per_namespace

    def _take(self, namespace: str) -> None:
        self._free -= 1
        self._held[namespace] += 1
