"""Local HTTP server in a background thread, for fake and failing hubs."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def serve_in_background(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP requests with the handler on a free port of the loopback interface and yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()  # seconds until it notices the shutdown
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
