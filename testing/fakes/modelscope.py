"""Fake of ModelScope's HTTP API for uploads and downloads, which keeps commits in memory.

Paths, parameters and fields of the responses are those that the client modelscope-hub 0.5.1 sends and reads.
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testing.fakes.http_server import serve_in_background

TOKEN = "ms-may-write"  # noqa: S105 (a fake token)
_MODEL_EXISTS = 10010101001
_READ_PATH = re.compile(r"/api/v1/(models|datasets)/([^/]+/[^/]+?)(?:/(repo|repo/files|repo/tree))?")


@dataclass
class FakeRepository:
    """Files by commit and path, oldest commit first, and commits by branch or tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_private: bool = False

    def push(self, commit: str, files: dict[str, bytes]) -> None:
        """Add a commit with these files only, and move the main branch to it."""
        self.commits[commit] = files
        self.refs["master"] = commit

    def list_entries(self, commit: str) -> list[dict[str, Any]]:
        """Return the entries of the list of files; each has the commit that changed the file last."""
        history = list(self.commits)
        history = history[: history.index(commit) + 1]
        entries = []
        for path, content in self.commits[commit].items():
            dates = [date for date, other in enumerate(history) if self.commits[other].get(path) == content]
            date = next(date for date in dates if all(later in dates for later in range(date, len(history))))
            entries.append(
                {
                    "Path": path,
                    "Name": path.rpartition("/")[2],
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": sha256(content).hexdigest(),
                    "Revision": history[date],
                    "CommittedDate": 1_700_000_000 + date,
                }
            )
        folders = {path.rpartition("/")[0] for path in self.commits[commit]} - {""}
        return [{"Path": folder, "Name": folder, "Type": "tree", "Size": 0} for folder in sorted(folders)] + entries


@dataclass
class FakeModelScope:
    """Fake ModelScope with repositories by name; if `error_status` is set, every request returns it.

    `models` and `datasets` can be read, and `repositories` written.
    """

    models: dict[str, FakeRepository] = field(default_factory=dict)
    datasets: dict[str, FakeRepository] = field(default_factory=dict)
    changed_fields: dict[str, Any] = field(default_factory=dict)  # of all entries of lists
    requests: list[str] = field(default_factory=list)  # paths and parameters of GET requests
    downloads: list[tuple[str, str]] = field(default_factory=list)  # commit or branch, and path of each file
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

    def handle_get(self, url: str, token: str) -> tuple[int, Any]:
        """Return a list of files, the description of a repository, or the content of a file."""
        self.requests.append(url)
        if self.error_status:
            return self.error_status, {"Code": self.error_status, "Message": "out of order", "Success": False}
        parts, query = urlsplit(url), parse_qs(urlsplit(url).query)
        match = _READ_PATH.fullmatch(parts.path)
        repositories = self.models if match and match[1] == "models" else self.datasets
        repository = repositories.get(match[2]) if match else None
        if match is None or repository is None or (repository.is_private and token != f"Bearer {TOKEN}"):
            return 404, {"Code": 10010205001, "Message": "the repository does not exist", "Success": False}
        if match[3] is None:
            return 200, {"Code": 200, "Success": True, "Data": {"Name": match[2]}}
        revision = query["Revision"][0]
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return 404, {"Code": 10010206404, "Message": f"revision {revision} does not exist", "Success": False}
        if match[3] != "repo":
            entries = repository.list_entries(commit) if query.get("PageNumber", ["1"]) == ["1"] else []
            entries = [{**entry, **self.changed_fields} for entry in entries]
            return 200, {"Code": 200, "Success": True, "Data": {"Files": entries, "LatestCommitter": {"Id": ""}}}
        path = query["FilePath"][0]
        self.downloads.append((revision, path))
        return 200, repository.commits[commit][path]

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

        do_PUT = do_POST  # noqa: N815 (name required by http.server)

        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "")
            if self.path.startswith("/openapi/"):
                status, content = hub.handle_request(self.path, b"", token)
            else:
                status, content = hub.handle_get(self.path, token)
            response = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def log_message(self, *_: object) -> None:
            """Suppress request logs."""

    with serve_in_background(ModelScopeHandler) as hub.address:
        yield hub
