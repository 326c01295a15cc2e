"""Keeps background loops alive after errors that nobody foresaw: one object must not end the process of all tenants.

Errors that end the process by design are raised elsewhere: the loss of the lease, and the end of kopf's watch.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from prometheus_client import Counter

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 60.0
FAILURE_LIMIT_SECONDS = 300.0  # a loop whose every round has failed for longer needs a new process
RESTART_SECONDS = 1.0
RECOVERED_SECONDS = 60.0  # a loop that was not restarted for this time works again


class ErrorNet:
    """Logs unexpected errors, at most once a minute for each place, and counts them."""

    def __init__(
        self,
        counter: Counter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        by_design: tuple[type[Exception], ...] = (),
    ) -> None:
        """Create a net. counter: has the label `loop`. by_design: exceptions that end the process."""
        self._counter = counter
        self._clock = clock
        self._by_design = by_design
        self._logged_at: dict[str, float] = {}  # by loop
        self._failing_since: dict[str, float] = {}  # by loop; absent after a successful round
        self._restarts: dict[str, tuple[float, float]] = {}  # by loop: times of the first and the last restart

    def record(self, loop: str, error: Exception, *, about: str = "") -> None:
        """Record an error that cost one round of a loop, or one object in a round. about: `kind namespace/name`."""
        now = self._clock()
        if self._counter is not None:
            self._counter.labels(loop).inc()
        if now - self._logged_at.get(loop, float("-inf")) >= LOG_INTERVAL_SECONDS:
            self._logged_at[loop] = now
            logger.error("%s failed unexpectedly, will be retried", loop, exc_info=error, extra={"object": about})

    async def repeat(
        self, loop: str, run_round: Callable[[], Awaitable[None]], interval_seconds: Callable[[], float]
    ) -> None:
        """Run a round after each interval, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds())
            try:
                await run_round()
            except self._by_design:
                raise
            except Exception as error:  # see the module
                self.record(loop, error)
                self._failing_since.setdefault(loop, self._clock())
            else:
                self._failing_since.pop(loop, None)

    async def keep_running(self, loop: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a loop until it returns, and again after an error that it did not handle."""
        delay_seconds = 0.0
        while True:
            try:
                if delay_seconds:
                    await asyncio.sleep(delay_seconds)
                return await run()
            except self._by_design:
                raise
            except Exception as error:  # see the module
                self.record(loop, error)
                now, delay_seconds = self._clock(), RESTART_SECONDS
                first, last = self._restarts.get(loop, (now, now))
                self._restarts[loop] = (first if now - last < RECOVERED_SECONDS else now, now)

    def longest_failure_seconds(self) -> float:
        """Return for how long every round of some loop has failed, or a loop was restarted again and again."""
        now = self._clock()
        restarted = [first for first, last in self._restarts.values() if now - last < RECOVERED_SECONDS]
        return now - min((*self._failing_since.values(), *restarted), default=now)
