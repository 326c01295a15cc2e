"""HTTP server with a bounded number of connections, a deadline per request and a bounded request size.

Every pod of the cluster may be able to connect. Slow or endless requests must not use up the threads of the pod, which
the ranks and their data loaders need.
"""

from __future__ import annotations

import io
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

MAX_CONNECTIONS = 16
REQUEST_SECONDS = 5.0  # time limit of a whole request, from accepting the connection to the end of the response
MAX_REQUEST_BYTES = 80 * 1024  # a progress report of 64 KiB with its headers


class BoundedServer(ThreadingHTTPServer):
    """Server that closes the oldest connection when a new one exceeds the limit, so that short requests succeed."""

    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._accepted_at: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._free_slots = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Bind without the DNS lookup of the base class, which may be slow in a new pod."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the connection in a new thread; if all threads are in use, end the oldest connection first."""
        if not self._free_slots.acquire(blocking=False):
            self._end_oldest_connection()
            if not self._free_slots.acquire(timeout=1.0):
                self.shutdown_request(request)
                return
        with self._lock:
            self._accepted_at[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the pod can start no more threads
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle one connection, and release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def service_actions(self) -> None:
        """End the connections whose time is up; serve_forever calls this method at least every 0.5 s."""
        expired_before = time.monotonic() - REQUEST_SECONDS
        with self._lock:
            for request, accepted_at in self._accepted_at.items():
                if accepted_at < expired_before:
                    _end_connection(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print unexpected errors; errors of the connection are ignored, because they would flood the training log."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _end_oldest_connection(self) -> None:
        with self._lock:
            if self._accepted_at:
                _end_connection(next(iter(self._accepted_at)))

    def _release(self, request: Any) -> None:
        with self._lock:
            self._accepted_at.pop(request, None)
        self._free_slots.release()


class _DualStackServer(BoundedServer):
    """Server on `::` that also accepts IPv4 connections."""

    address_family = socket.AF_INET6


class BoundedRequestHandler(BaseHTTPRequestHandler):
    """Request handler that reads at most MAX_REQUEST_BYTES of a request, and writes no access log."""

    timeout = REQUEST_SECONDS

    def setup(self) -> None:
        """Limit the number of bytes that can be read from the connection."""
        super().setup()
        self.rfile = io.BufferedReader(_LimitedReader(self.connection))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Discard the access log, which would flood the training log."""


class _LimitedReader(io.RawIOBase):
    """Reads a connection, and raises ConnectionAbortedError after MAX_REQUEST_BYTES."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._remaining_bytes = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        """Return True, as a BufferedReader requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read from the connection into the buffer, and return the number of bytes read."""
        if not self._remaining_bytes:
            raise ConnectionAbortedError(f"the request has more than {MAX_REQUEST_BYTES} bytes")
        count = self._connection.recv_into(buffer, min(len(buffer), self._remaining_bytes))
        self._remaining_bytes -= count
        return count


def bind_server(host: str, port: int, handler: type[BoundedRequestHandler]) -> BoundedServer:
    """Return a server at an IPv4 address, or with "" on all interfaces, for IPv6 and IPv4 where both are available.

    Raises: OSError if the port is in use.
    """
    if host:
        return BoundedServer((host, port), handler)
    try:
        return _DualStackServer(("::", port), handler)
    except OSError:  # IPv6 is unavailable, or the port is in use and the next line raises again
        return BoundedServer(("", port), handler)


def _end_connection(request: socket.socket) -> None:
    """Shut down a connection, so that the thread that reads from or writes to it ends."""
    with suppress(OSError):  # the connection may have ended by itself
        request.shutdown(socket.SHUT_RDWR)
