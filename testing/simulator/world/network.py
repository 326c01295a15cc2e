"""The way from an operator to the API server: slow, lossy, and the place where operators die."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from finetune_operator.kube.api_client import NO_ANSWER, ApiError, ApiServer
from testing.simulator.world.apiserver import Change, Raw, SimulatedApiServer, matches, parse_path
from testing.simulator.world.choices import Choices

LATENCIES = (0.001, 0.02, 0.3, 2.0, 8.0)


@dataclass(frozen=True)
class Weather:
    """How bad it is, in percent of the requests or events."""

    slow: float = 0.0
    refused: float = 0.0  # nothing was done: 500, 429, or no answer
    lost: float = 0.0  # it was done, but the answer did not come
    crash: float = 0.0  # the operator dies, before or after the effect
    lag: float = 0.0  # of watch events
    broken: float = 0.0  # streams that end, some of them too old to resume
    repeated: float = 0.0  # watch events


CALM = Weather()


class Link(ApiServer):
    """One operator's connection. The retries are those of the real client, in virtual time."""

    def __init__(
        self, server: SimulatedApiServer, choices: Choices, *, actor: str, on_crash: Callable[[], None]
    ) -> None:
        self._target = server
        self._choices = choices
        self._actor = actor
        self._on_crash = on_crash
        self._under_way: dict[asyncio.TimerHandle, Callable[[], None]] = {}
        self.weather = CALM
        self.cut = False  # nothing gets through

    async def call_once(
        self, method: str, path: str, *, body: Raw | None = None, params: Mapping[str, str] | None = None
    ) -> Raw:
        """One request, with whatever happens to it on the way."""
        if self.cut or self._choices.chance(self.weather.refused):
            await asyncio.sleep(self._latency())
            raise self._choices.pick(
                (
                    ApiError("no answer from the API server", status=NO_ANSWER),
                    ApiError("etcdserver: leader changed", status=500),
                    ApiError("too many requests", status=429, retry_after=1.0),
                )
            )
        crash = self._choices.pick(("before", "after")) if self._choices.chance(self.weather.crash) else ""
        if crash == "before":
            await self._die()
        answer = await self._carry_out(method, path, body, dict(params or {}))
        if crash == "after":
            await self._die()
        await asyncio.sleep(self._latency())
        if self._choices.chance(self.weather.lost):
            raise ApiError("no answer from the API server: the connection was closed", status=NO_ANSWER)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def watch(self, path: str, *, selector: str, version: str) -> AsyncIterator[Raw]:
        """Events in order, each as late as luck has it."""
        key, _ = parse_path(path)
        await asyncio.sleep(self._latency())
        if self.cut:
            raise _no_stream()
        if int(version) < self._target.oldest_version:
            raise ApiError("too old resource version", status=410, reason="Expired")
        history = self._target.history
        position = self._target.position_after(int(version))
        due = 0.0
        while True:
            if position == len(history):
                await self._target.wait_for_commit()
            change = history[position]
            position += 1
            event = _event(change, selector)
            if change.kind != key.kind or event is None:
                continue
            due = max(due, change.time + self._lag())
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            if self.cut or self._choices.chance(self.weather.broken):
                if self._choices.chance(50):
                    self._target.oldest_version = self._target.version
                raise _no_stream()
            for _ in range(2 if self._choices.chance(self.weather.repeated) else 1):
                yield {**event, "object": {**event["object"], "metadata": dict(event["object"]["metadata"])}}

    def drop_requests(self) -> None:
        """What has not reached the API server never will; else it arrives when it does, whoever leads by then."""
        for handle in list(self._under_way):
            handle.cancel()
        self._under_way.clear()

    async def _carry_out(self, method: str, path: str, body: Raw | None, params: dict[str, str]) -> Raw | ApiError:
        """The request travels by itself: the death of who sent it does not stop it."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[Raw | ApiError] = loop.create_future()

        def arrive() -> None:
            self._under_way.pop(handle, None)
            answer: Raw | ApiError
            try:
                answer = self._target.handle(method, path, body=body, params=params, actor=self._actor)
            except ApiError as error:
                answer = error
            if not arrived.done():
                arrived.set_result(answer)

        handle = loop.call_later(self._latency(), arrive)
        self._under_way[handle] = arrive
        return await arrived

    async def _die(self) -> None:
        self._on_crash()
        await asyncio.get_running_loop().create_future()  # cancelled with all that this operator does

    def _latency(self) -> float:
        if not self._choices.chance(self.weather.slow):
            return LATENCIES[0]
        return self._choices.pick(LATENCIES[1:])

    def _lag(self) -> float:
        return (
            self._latency() if not self._choices.chance(self.weather.lag) else self._choices.pick((0.1, 1.0, 5.0, 20.0))
        )


def _no_stream() -> ApiError:
    return ApiError("no answer from the API server: the stream was cut", status=NO_ANSWER)


def _event(change: Change, selector: str) -> Raw | None:
    """As who selects by labels is told: an object that loses them is deleted, in its last state that had them."""
    before = change.before is not None and matches(change.before, selector)
    if change.after is not None and matches(change.after, selector):
        return {"type": "MODIFIED" if before else "ADDED", "object": change.after}
    if not before or change.before is None:
        return None
    metadata = {**change.before["metadata"], "resourceVersion": str(change.version)}
    return {"type": "DELETED", "object": {**change.before, "metadata": metadata}}
