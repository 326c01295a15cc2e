"""Simulated network between operators and pods, over which operators poll the progress of training."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp


@dataclass
class PodResponse:
    """HTTP response of a pod; also the stream of its body."""

    body: bytes
    status: int = 200

    @property
    def content(self) -> "PodResponse":
        """Stream of the body."""
        return self

    async def readexactly(self, size: int) -> bytes:
        """Return the body, truncated to this size."""
        return self.body[:size]


class PodNetwork:
    """HTTP session for requests to pods."""

    def __init__(self, read_status: Callable[[str], bytes | None]) -> None:
        self._read_status = read_status  # returns the /status response of a pod IP address, None without a response

    @asynccontextmanager
    async def get(self, url: str, **_: object) -> AsyncIterator[PodResponse]:
        """Request the status of a pod."""
        body = self._read_status(urlsplit(url).hostname or "")
        if body is None:
            raise aiohttp.ClientConnectionError("the pod does not respond")
        yield PodResponse(body)
