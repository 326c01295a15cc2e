"""Handler of HTTP requests that responds like the Hub when it fails."""

import socket
import struct
import time
from http.server import BaseHTTPRequestHandler

_STATUS_BODIES = {
    401: "Invalid credentials in Authorization header",
    500: '{"error":"Internal Error - We\'re working hard to fix this as soon as possible!"}',
    502: "",
    503: "Service Temporarily Unavailable",
}
_HUB_ERRORS = {
    "m-404": (404, "RepoNotFound", "Repository not found"),
    "m-rev": (404, "RevisionNotFound", "Invalid rev id: v9"),
    "m-ent": (404, "EntryNotFound", "Entry not found"),
    "m-gated3": (
        403,
        "GatedRepo",
        "Access to model acme/m-gated3 is restricted and you are not in the authorized list."
        " Visit the page to ask for access.",
    ),
    "m-429": (429, "", "We had to rate limit you, you hit the quota of 1000 api requests per 5 minutes period."),
}


class FailingHub(BaseHTTPRequestHandler):
    """Handler whose failure is chosen by the name of the model in the path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        for name, (status, code, message) in _HUB_ERRORS.items():
            if name in self.path:
                return self._send(status, message, {"X-Error-Code": code, "X-Error-Message": message})
        if "m-cut" in self.path:
            return self._send(200, "x" * 1000, {"Content-Length": "50000"}, then_close=True)
        if "m-hang" in self.path:
            time.sleep(2)
            return None
        if "m-reset" in self.path:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if "m-reset" in self.path or "m-empty" in self.path:
            self.close_connection = True
            self.connection.close()
            return None
        status = next((status for status in _STATUS_BODIES if f"m-{status}" in self.path), 404)
        return self._send(status, _STATUS_BODIES.get(status, ""), {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, status: int, body: str, headers: dict[str, str], *, then_close: bool = False) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())
        self.close_connection = self.close_connection or then_close

    def log_message(self, *arguments: object) -> None:
        """Write no access log."""
