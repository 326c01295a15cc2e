"""API client of a simulated operator: the real client, whose HTTP session is replaced by a simulated connection.

This module is imported once per release of the operator, and must not keep state.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from finetune_operator.kube.api_client import NO_RESPONSE, ApiClient, ApiError
from testing.simulator.world import network
from testing.simulator.world.apiserver import RawBody
from testing.simulator.world.network import ServerError

# Smaller than those of the real client, so that a few jobs can use up all of them.
MAX_CREATES = 4
MAX_OTHER_REQUESTS = 4


@dataclass
class SimulatedResponse:
    """HTTP response with the attributes that the client reads."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> "SimulatedResponse":
        """The stream of the body, which is this object itself."""
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the body in one piece."""
        yield self.body


class SimulatedSession:
    """HTTP session that sends requests through a simulated connection."""

    def __init__(self, connection: network.Connection) -> None:
        self._connection = connection

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None,
        params: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  parameter of aiohttp
        **_: object,
    ) -> AsyncIterator[SimulatedResponse]:
        """Send a request; after a timeout it may still take effect."""
        body = None if data is None else from_json(data)
        try:
            async with asyncio.timeout(timeout.total):
                response = await self._connection.request(method, path, body=body, params=params)
        except network.ConnectionLost as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        yield _build_response(response)


class OperatorConnection(ApiClient):
    """Client of an operator, which limits, encodes and retries requests in virtual time as the real client does."""

    def __init__(self, connection: network.Connection) -> None:
        session: Any = SimulatedSession(connection)
        super().__init__("", request_session=session, watch_session=session)
        self._create_slots = type(self._create_slots)(MAX_CREATES)
        self._other_slots = type(self._other_slots)(MAX_OTHER_REQUESTS)
        self.connection = connection

    async def watch(self, path: str, *, selector: str, version: str) -> AsyncIterator[RawBody]:
        """Yield the watch events without encoding them, because that would take a third of the simulation's time."""
        try:
            async for event in self.connection.watch(path, selector=selector, version=version):
                yield event
        except ServerError as error:
            raise ApiError(error.message, status=error.status, reason=error.reason) from error
        except network.ConnectionLost as error:
            raise ApiError(f"no answer from the API server: {error}", status=NO_RESPONSE) from error


def _build_response(response: RawBody | ServerError) -> SimulatedResponse:
    if not isinstance(response, ServerError):
        return SimulatedResponse(200, to_json(response))
    status = {"kind": "Status", "message": response.message, "reason": response.reason}
    headers = {} if response.retry_after is None else {"Retry-After": str(response.retry_after)}
    return SimulatedResponse(response.status, to_json(status), headers)
