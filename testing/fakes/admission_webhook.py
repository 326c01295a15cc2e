"""HTTPS server that answers admission reviews of an API server, slowly or with a denial without a status code."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def serve_admission_webhook(
    address: str, certificate: Path, key: Path, *, allowed: bool, delay_seconds: float = 0.0
) -> Iterator[str]:
    """Serve admission reviews and yield the URL; every review gets the same answer after the delay."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(delay_seconds)
            response = {"uid": review["request"]["uid"], "allowed": allowed}
            body = json.dumps({**review, "request": None, "response": response}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Write no log."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer((address, 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://{address}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
