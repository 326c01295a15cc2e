"""Fake of an HTTP endpoint that receives CloudEvents, with scripted responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class ReceivedEvent:
    """Request that the sink received."""

    headers: Mapping[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        """The event, parsed from the body."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def kind(self) -> str:
        """The last word of the type of the event."""
        return str(self.event["type"]).rpartition(".")[2]


@dataclass
class FakeSink:
    """Records all requests; `statuses` are the next responses, afterwards all succeed.

    While `responds` is not set, no response is sent. Events that `refuses` selects get 404.
    """

    statuses: list[int] = field(default_factory=list)
    refuses: Callable[[dict[str, Any]], bool] = lambda _: False
    responds: asyncio.Event = field(default_factory=asyncio.Event)
    received: list[ReceivedEvent] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        """Record the request and send the next scripted response."""
        self.paths.append(request.path)
        self.received.append(ReceivedEvent(request.headers, await request.read()))
        await self.responds.wait()
        status = 404 if self.refuses(self.received[-1].event) else self.statuses.pop(0) if self.statuses else 202
        return web.Response(status=status, headers={"Location": "/elsewhere"}, text="x" * 100_000)


@asynccontextmanager
async def serve_sink() -> AsyncIterator[FakeSink]:
    """Serve the sink on a free port of the loopback interface."""
    sink, app = FakeSink(), web.Application()
    sink.responds.set()
    app.router.add_route("*", "/{path:.*}", sink.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sink.url = f"http://127.0.0.1:{runner.addresses[0][1]}/events?key=secret-in-query"
    try:
        yield sink
    finally:
        sink.responds.set()
        await runner.cleanup()
