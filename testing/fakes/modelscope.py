"""Fake of ModelScope's HTTP API for uploads, which keeps commits in memory."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from testing.fakes.http_server import serve_in_background

TOKEN = "ms-may-write"  # noqa: S105 (a fake token)
_MODEL_EXISTS = 10010101001


@dataclass
class FakeModelScope:
    """Fake ModelScope with repositories by name; if `error_status` is set, every request returns it."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created_repositories: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    error_status: int | None = None
    address: str = ""

    def handle_request(self, path: str, body: bytes, token: str) -> tuple[int, Any]:
        """Create repositories or store committed files; return the status and body of the response."""
        if self.error_status:
            return self.error_status, {"Code": self.error_status, "Message": "out of order", "Success": False}
        if token != f"Bearer {TOKEN}":
            return 401, {"Code": 10010205001, "Message": "the token is not valid", "Success": False}
        if path == "/openapi/v1/users/me":
            return 200, {"success": True, "data": {"preferred_username": "acme"}}
        if path.startswith("/blobs/"):
            self.blobs[path.removeprefix("/blobs/")] = body
            return 200, {"Code": 200}
        request = json.loads(body)
        if path == "/api/v1/models":
            return self._create_repository(request)
        name, _, action = path.removeprefix("/api/v1/repos/models/").partition("/commit/")
        if action:
            self.messages.append(request["commit_message"])
            self.repositories[name] |= {action["path"]: self._read_content(action) for action in request["actions"]}
            return 200, {"Code": 200, "Success": True, "Data": {"oid": "1"}}
        uploads = [(blob["oid"], f"{self.address}/blobs/{blob['oid']}") for blob in request["objects"]]
        objects = [{"oid": oid, "actions": {"upload": {"href": href}}} for oid, href in uploads]
        return 200, {"Code": 200, "Success": True, "Data": {"objects": objects}}

    def _create_repository(self, request: dict[str, Any]) -> tuple[int, Any]:
        name = f"{request['Path']}/{request['Name']}"
        if name in self.repositories:
            return 400, {"Code": _MODEL_EXISTS, "Message": "the model exists already", "Success": False}
        self.repositories[name] = {}
        self.created_repositories.append(request)
        return 200, {"Code": 200, "Success": True, "Data": {"Path": request["Path"], "Name": request["Name"]}}

    def _read_content(self, action: dict[str, Any]) -> bytes:
        return self.blobs[action["sha256"]] if action["type"] == "lfs" else base64.b64decode(action["content"])


@contextmanager
def serve_modelscope() -> Iterator[FakeModelScope]:
    hub = FakeModelScope()

    class ModelScopeHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, document = hub.handle_request(
                self.path.partition("?")[0], body, self.headers.get("Authorization", "")
            )
            response = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        do_GET = do_PUT = do_POST  # noqa: N815 (name required by http.server)

        def log_message(self, *_: object) -> None:
            """Suppress request logs."""

    with serve_in_background(ModelScopeHandler) as hub.address:
        yield hub
