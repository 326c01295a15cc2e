"""Requests to the API server through `kubectl proxy`; each takes milliseconds, a kubectl process 0.1 s of CPU time."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RawBody = dict[str, Any]
CONNECTIONS = 8
UNAVAILABLE = (429, 502, 503, 504)  # an apply request with an unknown field is answered with 500


class ApiUnavailable(RuntimeError):
    """The API server did not process a request, which may be repeated."""


class RequestRejected(RuntimeError):
    """The API server rejected a request; the text is its message."""


class SocketConnection(http.client.HTTPConnection):
    """HTTP connection to a Unix socket."""

    def __init__(self, path: Path, *, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


class KubectlProxy:
    """A process `kubectl proxy` with the credentials of any kubeconfig; it ends with this object.

    Its socket is in a folder that only this user can read. Threads may send requests at the same time.
    """

    def __init__(self, kubectl: Path, kubeconfig: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._socket = Path(self._folder.name) / "api"
        command = (str(kubectl), "--kubeconfig", str(kubeconfig), "proxy", f"--unix-socket={self._socket}")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # not the signal at the end of a parent, which the kernel sends at the end of the thread that started it
        weakref.finalize(self, process.terminate)
        assert process.stdout is not None
        if "Starting to serve" not in process.stdout.readline():
            raise ApiUnavailable(f"`{' '.join(command)}` ended without serving requests")

    def send(
        self,
        method: str,
        path: str,
        body: RawBody | None = None,
        *,
        content_type: str = "application/json",
        timeout_seconds: float = 30,
    ) -> RawBody:
        """Send a request and return the object in the response.

        Raises:
            ApiUnavailable: the API server is not reachable, or cannot process the request at the moment.
            RequestRejected: it rejected the request.
        """
        connection = SocketConnection(self._socket, timeout_seconds=timeout_seconds)
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, body=content, headers={"Content-Type": content_type})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ApiUnavailable(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if response.status in UNAVAILABLE:
            raise ApiUnavailable(f"{method} {path}: {response.status} {text[:500]}")
        try:
            parsed: RawBody = json.loads(text)
        except ValueError as error:
            raise ApiUnavailable(f"{method} {path}: {response.status} {text[:500]}") from error
        if response.status >= 400:
            raise RequestRejected(parsed["message"])
        return parsed

    def send_all(self, method: str, bodies_by_path: Iterable[tuple[str, RawBody]]) -> list[RawBody]:
        """Send one request per body, several at the same time, and return the objects in the responses, in order."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(lambda request: self.send(method, *request), bodies_by_path))
