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


class ErrorNet:
    """Logs unexpected errors, at most once a minute for each place, and counts them."""

    def __init__(self, counter: Counter | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a net. counter: has the label `loop`."""
        self._counter = counter
        self._clock = clock
        self._logged_at: dict[str, float] = {}  # by loop
        self._failing_since: dict[str, float] = {}  # by loop; absent after a successful round

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
            except Exception as error:  # see the module
                self.record(loop, error)
                self._failing_since.setdefault(loop, self._clock())
            else:
                self._failing_since.pop(loop, None)

    def longest_failure_seconds(self) -> float:
        """Return for how long every round of some loop has failed."""
        return self._clock() - min(self._failing_since.values(), default=self._clock())
