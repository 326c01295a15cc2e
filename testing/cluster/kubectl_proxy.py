"""Requests to the API server through `kubectl proxy`; each takes milliseconds, a kubectl process 0.1 s of CPU time."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

RawBody = dict[str, Any]
TIMEOUT_SECONDS = 30
UNAVAILABLE = (429, 502, 503, 504)  # an apply request with an unknown field is answered with 500


class ApiUnavailable(Exception):
    """The API server did not process a request, which may be repeated."""


class RequestRejected(RuntimeError):
    """The API server rejected a request; the text is its message."""


class SocketConnection(http.client.HTTPConnection):
    """HTTP connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_SECONDS)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_SECONDS)
        self.sock.connect(str(self.path))


class KubectlProxy:
    """A process `kubectl proxy` with the credentials of any kubeconfig; it ends with this process.

    Its socket is in a folder that only this user can read.
    """

    def __init__(self, kubectl: Path, kubeconfig: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._socket = Path(self._folder.name) / "api"
        command = (str(kubectl), "--kubeconfig", str(kubeconfig), "proxy", f"--unix-socket={self._socket}")
        self._process = subprocess.Popen(
            ("setpriv", "--pdeathsig", "TERM", *command), stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "Starting to serve" not in line:
            raise ApiUnavailable(f"`{' '.join(command)}` ended without serving requests")

    def send(self, method: str, path: str, body: str = "", *, content_type: str = "application/json") -> RawBody:
        """Send a request and return the object in the response.

        Raises:
            ApiUnavailable: the API server is not reachable, or cannot process the request at the moment.
            RequestRejected: it rejected the request.
        """
        connection = SocketConnection(self._socket)
        try:
            connection.request(method, path, body=body.encode(), headers={"Content-Type": content_type})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ApiUnavailable(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if response.status in UNAVAILABLE:
            raise ApiUnavailable(f"{method} {path}: {response.status} {content.decode(errors='replace')[:500]}")
        parsed: RawBody = json.loads(content)
        if response.status >= 400:
            raise RequestRejected(parsed["message"])
        return parsed
