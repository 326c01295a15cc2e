"""A local HTTP server in a background thread, for fakes of hubs."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def serve_in_background(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server with this handler on a free port of the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
