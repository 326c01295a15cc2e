"""As much of ModelScope's HTTP API as an upload needs; what is committed is kept in memory."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "ms-may-write"  # noqa: S105  of nobody
_EXISTS = 10010101001


@dataclass
class FakeModelScope:
    """Repositories by name, each with its files; `broken` answers every request with that status."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    made: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    broken: int | None = None
    address: str = ""

    def answer(self, path: str, body: bytes, token: str) -> tuple[int, Any]:
        if self.broken:
            return self.broken, {"Code": self.broken, "Message": "out of order", "Success": False}
        if token != f"Bearer {TOKEN}":
            return 401, {"Code": 10010205001, "Message": "the token is not valid", "Success": False}
        if path == "/openapi/v1/users/me":
            return 200, {"success": True, "data": {"preferred_username": "acme"}}
        if path.startswith("/blobs/"):
            self.blobs[path.removeprefix("/blobs/")] = body
            return 200, {"Code": 200}
        asked = json.loads(body)
        if path == "/api/v1/models":
            return self._make(asked)
        name, _, action = path.removeprefix("/api/v1/repos/models/").partition("/commit/")
        if action:
            self.messages.append(asked["commit_message"])
            self.repositories[name] |= {each["path"]: self._content(each) for each in asked["actions"]}
            return 200, {"Code": 200, "Success": True, "Data": {"oid": "1"}}
        wanted = [(each["oid"], f"{self.address}/blobs/{each['oid']}") for each in asked["objects"]]
        objects = [{"oid": oid, "actions": {"upload": {"href": href}}} for oid, href in wanted]
        return 200, {"Code": 200, "Success": True, "Data": {"objects": objects}}

    def _make(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['Path']}/{asked['Name']}"
        if name in self.repositories:
            return 400, {"Code": _EXISTS, "Message": "the model exists already", "Success": False}
        self.repositories[name] = {}
        self.made.append(asked)
        return 200, {"Code": 200, "Success": True, "Data": {"Path": asked["Path"], "Name": asked["Name"]}}

    def _content(self, action: dict[str, Any]) -> bytes:
        return self.blobs[action["sha256"]] if action["type"] == "lfs" else base64.b64decode(action["content"])


@contextmanager
def serve_modelscope() -> Iterator[FakeModelScope]:
    hub = FakeModelScope()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, said = hub.answer(self.path.partition("?")[0], body, self.headers.get("Authorization", ""))
            told = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_PUT = do_POST  # noqa: N815  as http.server wants it

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
