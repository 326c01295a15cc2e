"""Simulated network between operators and the API server, with delays, lost responses and crashes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from finetune_operator.kube.api_client import NO_RESPONSE, ApiError
from testing.fakes.label_selector import matches_selector
from testing.simulator.world.apiserver import Change, RawBody, SimulatedApiServer, parse_path
from testing.simulator.world.choices import Choices

LATENCIES = (0.001, 0.02, 0.3, 2.0, 8.0)


@dataclass(frozen=True)
class NetworkFaults:
    """Probabilities of network faults, in percent of all requests or watch events."""

    slow_requests: float = 0.0
    rejected_requests: float = 0.0  # requests fail without effect, with status 500 or 429 or without a response
    lost_responses: float = 0.0  # requests take effect, but their responses are lost
    crashes: float = 0.0  # the operator crashes before or after a request takes effect
    delayed_events: float = 0.0  # watch events are delayed
    broken_watches: float = 0.0  # watch streams end, some of them with an expired version
    repeated_events: float = 0.0  # watch events are delivered twice


NO_FAULTS = NetworkFaults()


ServerError = ApiError  # error response of the API server, whose class does not depend on the operator's release


class ConnectionLost(Exception):
    """Raised instead of a response if the connection breaks; the request may have taken effect."""


# Uid of the job whose pass sends a request; empty outside passes.
acting_job_uid: ContextVar[str] = ContextVar("acting_job_uid", default="")


class Connection:
    """Connection of a process to the API server. Errors are returned as ApiError, because releases differ in theirs."""

    def __init__(
        self, server: SimulatedApiServer, choices: Choices, *, actor: str, on_crash: Callable[[], None]
    ) -> None:
        self._target = server
        self._choices = choices
        self._actor = actor
        self._on_crash = on_crash
        self._in_flight: dict[asyncio.TimerHandle, Callable[[], None]] = {}
        self.faults = NO_FAULTS
        self.slow_creates: dict[str, float] = {}  # seconds that an admission webhook takes, by namespace
        self.is_partitioned = False  # all requests and watches fail

    async def request(
        self, method: str, path: str, *, body: RawBody | None, params: Mapping[str, str] | None
    ) -> RawBody | ApiError:
        """Send one request under the configured network faults.

        Raises: ConnectionLost
        """
        if self.is_partitioned or self._choices.draw_boolean(self.faults.rejected_requests):
            await asyncio.sleep(self._draw_latency())
            response: RawBody | ApiError = self._choices.pick(
                (
                    ApiError("no answer from the API server", status=NO_RESPONSE),
                    ApiError("etcdserver: leader changed", status=500),
                    ApiError("too many requests", status=429, retry_after=1.0),
                )
            )
            if isinstance(response, ApiError) and response.status == NO_RESPONSE:
                raise ConnectionLost("the connection was refused")
            return response
        crash = self._choices.pick(("before", "after")) if self._choices.draw_boolean(self.faults.crashes) else ""
        if crash == "before":
            await self._crash()
        response = await self._transmit(method, path, body, dict(params or {}))
        if crash == "after":
            await self._crash()
        await asyncio.sleep(self._draw_latency())
        if self._choices.draw_boolean(self.faults.lost_responses):
            raise ConnectionLost("the connection was closed")
        return response

    async def watch(self, path: str, *, selector: str, version: str) -> AsyncIterator[RawBody]:
        """Yield the watch events in order, each after a delay.

        Raises: ConnectionLost, or ApiError if the version has expired.
        """
        key, _ = parse_path(path)
        await asyncio.sleep(self._draw_latency())
        if self.is_partitioned:
            raise ConnectionLost("the stream was cut")
        if int(version) < self._target.oldest_version:
            raise ApiError("too old resource version", status=410, reason="Expired")
        history = self._target.history
        position = self._target.find_position_after(int(version))
        delivery_time = 0.0
        while True:
            if position == len(history):
                await self._target.wait_for_commit()
            change = history[position]
            position += 1
            event = _build_watch_event(change, selector) if change.kind == key.kind else None
            if event is None:
                continue
            delivery_time = max(delivery_time, change.time + self._draw_event_delay())
            await asyncio.sleep(max(0.0, delivery_time - asyncio.get_running_loop().time()))
            if self.is_partitioned or self._choices.draw_boolean(self.faults.broken_watches):
                if self._choices.draw_boolean(50):
                    self._target.oldest_version = self._target.version
                raise ConnectionLost("the stream was cut")
            for _ in range(2 if self._choices.draw_boolean(self.faults.repeated_events) else 1):
                yield {**event, "object": {**event["object"], "metadata": dict(event["object"]["metadata"])}}

    def drop_requests(self) -> None:
        """Cancel the requests in flight, so that they do not arrive when another operator leads."""
        for handle in list(self._in_flight):
            handle.cancel()
        self._in_flight.clear()

    async def _transmit(
        self, method: str, path: str, body: RawBody | None, params: dict[str, str]
    ) -> RawBody | ApiError:
        """Deliver the request after its latency.

        If the sender times out or is cancelled, its connection is closed and the API server aborts the request, unless
        it is already being committed.
        """
        loop = asyncio.get_running_loop()
        response_future: asyncio.Future[RawBody | ApiError] = loop.create_future()
        job_uid = acting_job_uid.get()
        actor = f"{self._actor}/{job_uid}" if job_uid else self._actor

        def deliver() -> None:
            self._in_flight.pop(handle, None)
            response: RawBody | ApiError
            try:
                response = self._target.handle(method, path, body=body, params=params, actor=actor)
            except ApiError as error:
                response = error
            if not response_future.done():
                response_future.set_result(response)

        handle = loop.call_later(self._draw_latency() + self._get_webhook_seconds(method, path), deliver)
        self._in_flight[handle] = deliver
        try:
            return await response_future
        except asyncio.CancelledError:
            if self._in_flight.pop(handle, None) is not None:
                handle.cancel()
                if self._choices.draw_boolean(50):
                    deliver()
            raise

    async def _crash(self) -> None:
        self._on_crash()
        await asyncio.get_running_loop().create_future()  # wait until the operator's tasks are cancelled

    def _get_webhook_seconds(self, method: str, path: str) -> float:
        return self.slow_creates.get(parse_path(path)[0].namespace, 0.0) if method == "POST" else 0.0

    def _draw_latency(self) -> float:
        if not self._choices.draw_boolean(self.faults.slow_requests):
            return LATENCIES[0]
        return self._choices.pick(LATENCIES[1:])

    def _draw_event_delay(self) -> float:
        return (
            self._choices.pick((0.1, 1.0, 5.0, 20.0))
            if self._choices.draw_boolean(self.faults.delayed_events)
            else self._draw_latency()
        )


def _build_watch_event(change: Change, selector: str) -> RawBody | None:
    """Return the event that a watch with this label selector receives.

    If the object no longer matches, the event is DELETED with the last matching state.
    """
    before = change.old_body is not None and matches_selector(change.old_body, selector)
    if change.new_body is not None and matches_selector(change.new_body, selector):
        return {"type": "MODIFIED" if before else "ADDED", "object": change.new_body}
    if not before or change.old_body is None:
        return None
    metadata = {**change.old_body["metadata"], "resourceVersion": str(change.version)}
    return {"type": "DELETED", "object": {**change.old_body, "metadata": metadata}}
