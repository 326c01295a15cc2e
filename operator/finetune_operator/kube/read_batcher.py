"""Combines concurrent reads of one group into one request."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Group = TypeVar("Group", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

MAX_BATCH_SIZE = 25
# A request that takes longer does not delay the next batch, so that a lost response does not delay other jobs.
MAX_WAIT_SECONDS = 1.0


class ReadBatcher(Generic[Group, Key, Value]):
    """Serves concurrent reads of one group with one request (decisions/130).

    A read that arrives while no request of its group is in flight starts one at once. Reads that arrive meanwhile wait
    for the end of that request and share the next one. Every read is served by a request that starts after the call,
    so it is as consistent as a request of its own.

    fetch: sends one request for the given keys of a group and returns the value of each key.
    """

    def __init__(self, fetch: Callable[[Group, tuple[Key, ...]], Awaitable[Mapping[Key, Value]]]) -> None:
        self._fetch = fetch
        self._batches: dict[Group, list[dict[Key, list[asyncio.Future[Value]]]]] = {}  # not sent yet, oldest first
        self._senders: dict[Group, asyncio.Task[None]] = {}
        self._requests: set[asyncio.Task[None]] = set()

    async def read(self, group: Group, key: Key) -> Value:
        """Return the value of the key, from a request that starts after this call.

        Raises: the exception that `fetch` raises.
        """
        batches = self._batches.setdefault(group, [{}])
        if key not in batches[-1] and len(batches[-1]) >= MAX_BATCH_SIZE:
            batches.append({})
        future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        batches[-1].setdefault(key, []).append(future)
        if group not in self._senders:
            self._senders[group] = asyncio.create_task(self._send_batches(group))
        return await future

    async def _send_batches(self, group: Group) -> None:
        """Send the batches of a group, one after the other, until none is left."""
        try:
            while batches := self._batches.pop(group, None):
                batch, *later_batches = batches
                if later_batches:
                    self._batches[group] = later_batches
                request = asyncio.create_task(self._send(group, batch))
                self._requests.add(request)
                request.add_done_callback(self._requests.discard)
                await asyncio.wait((request,), timeout=MAX_WAIT_SECONDS)
        finally:
            del self._senders[group]

    async def _send(self, group: Group, batch: dict[Key, list[asyncio.Future[Value]]]) -> None:
        try:
            values = await self._fetch(group, tuple(batch))
        except Exception as error:  # each reader raises it
            for future in _select_pending(batch.values()):
                future.set_exception(error)
            return
        for key, futures in batch.items():
            for future in _select_pending([futures]):
                future.set_result(values[key])


def _select_pending(futures: Iterable[list[asyncio.Future[Value]]]) -> list[asyncio.Future[Value]]:
    """Return the futures whose reader was not cancelled."""
    return [future for group in futures for future in group if not future.done()]
