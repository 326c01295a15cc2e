"""HTTP connection to the API server of a throwaway cluster, for many requests that kubectl would be too slow for."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from testing.cluster.host.commands import HarnessError
from testing.cluster.node.pki import list_users
from testing.cluster.throwaway import ThrowawayCluster

RawBody = dict[str, Any]
CONNECTIONS = 8


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: RawBody | None = None


class ApiConnection:
    """Connection of the cluster's administrator; the request after a failed one opens a new connection."""

    def __init__(self, cluster: ThrowawayCluster, *, timeout_seconds: float = 30) -> None:
        layout = cluster.layout
        admin = next(user for user in list_users(layout) if user.name == "admin")
        self._headers = {"Authorization": f"Bearer {admin.token}", "Content-Type": "application/json"}
        self._server = layout.api_server.removeprefix("https://")
        self._context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        self._timeout_seconds = timeout_seconds
        self._connection: http.client.HTTPSConnection | None = None

    def send(self, request: Request) -> tuple[int, bytes]:
        """Send a request and return the status code and the body of the response.

        Raises: OSError or http.client.HTTPException
        """
        connection = self._connection or http.client.HTTPSConnection(
            self._server, timeout=self._timeout_seconds, context=self._context
        )
        self._connection = None
        content = None if request.body is None else json.dumps(request.body).encode()
        connection.request(request.method, request.path, body=content, headers=self._headers)
        response = connection.getresponse()
        body = response.read()
        self._connection = connection
        return response.status, body

    def call(self, request: Request) -> RawBody:
        """Send a request and return the object in the response.

        Raises: HarnessError if the API server rejects the request or does not respond.
        """
        try:
            status, body = self.send(request)
        except (OSError, http.client.HTTPException) as error:
            raise HarnessError(f"{request.method} {request.path}: {error!r}") from error
        if status >= 400:
            raise HarnessError(f"{request.method} {request.path}: {status} {body.decode(errors='replace')[:500]}")
        parsed: RawBody = json.loads(body)
        return parsed

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def call_all(cluster: ThrowawayCluster, requests: Iterable[Request]) -> list[RawBody]:
    """Send the requests through several connections and return the objects in their responses, in order."""
    local = threading.local()

    def call(request: Request) -> RawBody:
        if not hasattr(local, "connection"):
            local.connection = ApiConnection(cluster)
        connection: ApiConnection = local.connection
        return connection.call(request)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(call, requests))
