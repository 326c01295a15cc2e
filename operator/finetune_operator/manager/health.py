"""Is this replica alive, and is it ready? And the port where Kubernetes and Prometheus ask."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from finetune_operator.metrics import Metrics

LAG_INTERVAL = 0.5
LAG_WINDOW = 60.0
Check = Callable[[], str | None]  # what is wrong, if anything


class Health:
    """Checks by name; the replica is alive if none of `alive` finds anything wrong, ready likewise."""

    def __init__(self) -> None:
        self._alive: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def alive_if(self, name: str, check: Check) -> None:
        """Add a check that a restart of the process would mend."""
        self._alive[name] = check

    def ready_if(self, name: str, check: Check) -> None:
        """Add a check that time should mend."""
        self._ready[name] = check

    def problems(self, *, readiness: bool) -> tuple[str, ...]:
        """Everything that is wrong at the moment."""
        return tuple(_failing(self._ready if readiness else self._alive))


def _failing(checks: dict[str, Check]) -> Iterator[str]:
    for name, check in checks.items():
        if problem := check():
            yield f"{name}: {problem}"


def not_longer_than(limit: float, read: Callable[[], float], what: str) -> Check:
    """A check that a duration in seconds stays within a limit."""

    def check() -> str | None:
        seconds = read()
        return None if seconds <= limit else f"{what} for {seconds:.0f} s (limit {limit:.0f} s)"

    return check


class LastContact:
    """Middleware of a client session: remembers when a request last ended, in whatever way."""

    def __init__(self) -> None:
        self._time = time.monotonic()

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Pass the request on; of a watch, this ends with the first byte of the answer."""
        try:
            return await handler(request)
        finally:
            self._time = time.monotonic()

    def age_seconds(self) -> float:
        """Time since the last contact."""
        return time.monotonic() - self._time


class LoopLag:
    """How late the event loop runs what is due; a loop that is late renews no lease and reads no watch."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lags: deque[float] = deque(maxlen=int(LAG_WINDOW / LAG_INTERVAL))

    @property
    def worst_seconds(self) -> float:
        """Worst delay of the last minute."""
        return max(self._lags, default=0.0)

    async def run(self) -> None:
        """Measure for ever."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LAG_INTERVAL)
            self._lags.append(max(0.0, loop.time() - before - LAG_INTERVAL))
            self._metrics.loop_lag.set(self.worst_seconds)


async def serve(health: Health, metrics: Metrics, *, port: int, host: str | None = None) -> web.AppRunner:
    """Answer /healthz, /readyz and /metrics, on all interfaces by default, until the runner is cleaned up."""

    async def report(request: web.Request) -> web.Response:
        problems = health.problems(readiness=request.path == "/readyz")
        return web.Response(text="\n".join(problems) or "ok", status=503 if problems else 200)

    async def expose(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", report), web.get("/readyz", report), web.get("/metrics", expose)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
