"""As much of the Hub's HTTP API as uploads and downloads need; what is committed is kept in memory."""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote

SHA = "5eed" * 10
TOKEN = "hf_may_write"  # noqa: S105  of nobody


@dataclass
class FakeHub:
    """Repositories by name, each with its files; `broken` answers every request with that status, `slow` takes so many
    seconds for each step of an upload."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)  # all at commit SHA
    asked: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    broken: int | None = None
    slow: float = 0.0
    address: str = ""

    def give(self, path: str, token: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers of what is read: what a dataset holds, or one of its files."""
        self.asked.append(path)
        if self.broken:
            return self.broken, {"error": "out of order"}, {}
        if path.startswith("/api/models/"):
            may = token == f"Bearer {TOKEN}"
            return (200, {"id": "known"}, {}) if may else (403, {"error": "you may only read this"}, {})
        if path.startswith("/api/datasets/"):
            owner, name, *rest = path.removeprefix("/api/datasets/").split("/")
            files = self.datasets.get(f"{owner}/{name}")
            if files is None:
                return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            if rest[:1] == ["tree"]:
                return 200, [{"type": "file", "path": each, "size": len(files[each]), "oid": "1"} for each in files], {}
            siblings = [{"rfilename": each} for each in files]
            return 200, {"id": f"{owner}/{name}", "sha": SHA, "siblings": siblings}, {}
        repository, _, file = path.removeprefix("/datasets/").partition(f"/resolve/{SHA}/")
        content = self.datasets.get(repository, {}).get(unquote(file))
        if content is None:
            return 404, {"error": "no such file"}, {}
        return 200, content, {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}

    def answer(self, path: str, body: bytes, token: str) -> tuple[int, Any]:
        if self.broken:
            return self.broken, {"error": "out of order"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            self.repositories[name], self.visibility[name] = {}, asked["visibility"]
            return 200, {"url": f"{self.address}/{name}"}
        if path == "/api/validate-yaml":  # the head of a README.md
            return 200, {"errors": [], "warnings": []}
        time.sleep(self.slow)
        repository, _, action = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        files = self.repositories[repository]
        if action == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            told = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return 200, {"files": told}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.address}/{repository}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, said = hub.answer(self.path, body, self.headers.get("Authorization", ""))
            told = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def do_GET(self) -> None:
            status, said, headers = hub.give(self.path.partition("?")[0], self.headers.get("Authorization", ""))
            told = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(told))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(told)

        do_HEAD = do_GET  # noqa: N815  as http.server wants it

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
