"""Wall clock that ignores a jump until the new time has lasted for two minutes (decisions/128)."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

logger = logging.getLogger(__name__)

MAX_DEVIATION = timedelta(seconds=60)  # smaller corrections, such as those of NTP, apply at once
CONFIRMATION_SECONDS = 120.0


class StableClock:
    """Returns the wall clock time, compared with the monotonic clock since the last call.

    A wrong time that is corrected soon would otherwise expire deadlines and delete finished jobs for good.
    """

    def __init__(
        self,
        *,
        read_wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        read_monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_wall = read_wall
        self._read_monotonic = read_monotonic
        self._wall = read_wall()
        self._monotonic = read_monotonic()
        self._jumped_at: float | None = None  # monotonic time at which the wall clock began to deviate

    def now(self) -> datetime:
        """Return the wall clock time or, during the first two minutes after a jump, the time without the jump."""
        wall, monotonic = self._read_wall(), self._read_monotonic()
        expected = self._wall + timedelta(seconds=monotonic - self._monotonic)
        if abs(wall - expected) > MAX_DEVIATION:
            if self._jumped_at is None:
                self._jumped_at = monotonic
                logger.warning("the clock jumped from %s to %s; ignored for two minutes", expected, wall)
            if monotonic - self._jumped_at < CONFIRMATION_SECONDS:
                return expected
        self._wall, self._monotonic, self._jumped_at = wall, monotonic, None
        return wall
