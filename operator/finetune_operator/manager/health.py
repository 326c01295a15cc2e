"""Liveness and readiness checks, and the HTTP server for /healthz, /readyz and /metrics."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from finetune_operator.metrics import Metrics

LAG_INTERVAL_SECONDS = 0.5
LAG_WINDOW_SECONDS = 60.0
Check = Callable[[], str | None]  # a check returns a description of the problem, or None


class Health:
    """Registry of liveness and readiness checks; a probe succeeds if its checks return no problems."""

    def __init__(self) -> None:
        self._liveness_checks: dict[str, Check] = {}
        self._readiness_checks: dict[str, Check] = {}

    def add_liveness_check(self, name: str, check: Check) -> None:
        """Add a check whose problems require a restart of the process."""
        self._liveness_checks[name] = check

    def add_readiness_check(self, name: str, check: Check) -> None:
        """Add a check whose problems are temporary and only make the process unready."""
        self._readiness_checks[name] = check

    def find_problems(self, *, readiness: bool) -> tuple[str, ...]:
        """Run the checks and return the problems, each prefixed with the name of the check."""
        return tuple(_run_checks(self._readiness_checks if readiness else self._liveness_checks))


def _run_checks(checks: dict[str, Check]) -> Iterator[str]:
    for name, check in checks.items():
        if problem := check():
            yield f"{name}: {problem}"


def build_duration_check(limit_seconds: float, get_duration_seconds: Callable[[], float], description: str) -> Check:
    """Build a check that reports a problem if a duration exceeds the limit."""

    def check() -> str | None:
        seconds = get_duration_seconds()
        return None if seconds <= limit_seconds else f"{description} for {seconds:.0f} s (limit {limit_seconds:.0f} s)"

    return check


class LastRequestTime:
    """Client middleware that records the end time of the last request, including failed ones."""

    def __init__(self) -> None:
        self._ended_at = time.monotonic()

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send the request and record its end time; a watch request ends when its response headers arrive."""
        try:
            return await handler(request)
        finally:
            self._ended_at = time.monotonic()

    def seconds_since_request(self) -> float:
        """Return the seconds since the last request ended."""
        return time.monotonic() - self._ended_at


class EventLoopLag:
    """Measures how long a blocked event loop delays its timers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lags: deque[float] = deque(maxlen=int(LAG_WINDOW_SECONDS / LAG_INTERVAL_SECONDS))

    @property
    def worst_seconds(self) -> float:
        """Longest delay within the last minute, in seconds."""
        return max(self._lags, default=0.0)

    async def run(self) -> None:
        """Measure the delay twice a second until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            slept_at = loop.time()
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self._lags.append(max(0.0, loop.time() - slept_at - LAG_INTERVAL_SECONDS))
            self._metrics.loop_lag.set(self.worst_seconds)


async def start_http_server(health: Health, metrics: Metrics, *, port: int, host: str | None = None) -> web.AppRunner:
    """Serve /healthz, /readyz and /metrics, by default on all interfaces, until the runner is cleaned up."""

    async def serve_health(request: web.Request) -> web.Response:
        problems = health.find_problems(readiness=request.path == "/readyz")
        return web.Response(text="\n".join(problems) or "ok", status=503 if problems else 200)

    async def serve_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", serve_health), web.get("/readyz", serve_health), web.get("/metrics", serve_metrics)]
    )
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
