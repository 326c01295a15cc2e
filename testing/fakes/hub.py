"""Fake of the Hugging Face Hub's HTTP API for uploads and downloads, which keeps commits in memory."""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import transformers
from huggingface_hub import constants

from testing.fakes.http_server import serve_in_background

SHA = "5eed" * 10
TOKEN = "hf_may_write"  # noqa: S105 (a fake token)


Response = tuple[int, Any, dict[str, str]]  # status, body and headers


@dataclass
class FakeModel:
    """Model repository: files by commit and file name, and commits by branch or tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False

    def push(self, commit: str, folder: Path) -> None:
        """Add the files of the folder as a commit, and move the main branch to it."""
        self.commits[commit] = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.refs["main"] = commit

    def list_files(self, commit: str, folder: str) -> Response:
        """Return the response for the list of all files of a commit, which has no folders."""
        if self.is_gated:
            return 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"}
        if folder:
            return 404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"}
        files = self.commits[commit].items()
        return 200, [{"type": "file", "path": name, "size": len(file), "oid": "1"} for name, file in files], {}

    def handle_get(self, revision: str, file: str) -> Response:
        """Return the response for a file of a branch, tag or commit."""
        commit = self.refs.get(revision, revision)
        if self.is_gated:
            return 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"}
        if commit not in self.commits:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        content = self.commits[commit].get(file)
        if content is None:
            return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
        return 200, content, {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": commit}


@dataclass
class FakeHub:
    """Fake Hub with models by name, and repositories and datasets by name, each a dictionary of files.

    If `error_status` is set, every request returns it; `delay_seconds` delays each upload request.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, dict[str, bytes]] = field(
        default_factory=dict
    )  # files by dataset and file name; every dataset has the commit SHA
    models: dict[str, FakeModel] = field(default_factory=dict)
    requested_paths: list[str] = field(default_factory=list)  # of GET and HEAD requests
    downloaded_paths: list[str] = field(default_factory=list)  # of GET requests
    messages: list[str] = field(default_factory=list)
    error_status: int | None = None
    delay_seconds: float = 0.0
    address: str = ""

    def handle_get(self, path: str, token: str) -> Response:
        """Return the response for a dataset, its file list or a file of a dataset or model."""
        self.requested_paths.append(path)
        if self.error_status:
            return self.error_status, {"error": "out of order"}, {}
        if path.startswith("/api/models/") and "/tree/" in path:
            name, _, location = path.removeprefix("/api/models/").partition("/tree/")
            commit, _, folder = location.partition("/")
            return self.models[name].list_files(commit, folder)
        if path.startswith("/api/models/"):
            authorized = token == f"Bearer {TOKEN}"
            return (200, {"id": "known"}, {}) if authorized else (403, {"error": "you may only read this"}, {})
        if path.startswith("/api/datasets/"):
            owner, name, *rest = path.removeprefix("/api/datasets/").split("/")
            files = self.datasets.get(f"{owner}/{name}")
            if files is None:
                return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            if rest[:1] == ["tree"]:
                return 200, [{"type": "file", "path": file, "size": len(files[file]), "oid": "1"} for file in files], {}
            siblings = [{"rfilename": file} for file in files]
            return 200, {"id": f"{owner}/{name}", "sha": SHA, "siblings": siblings}, {}
        if not path.startswith("/datasets/"):
            name, _, location = path.removeprefix("/").partition("/resolve/")
            model, (revision, _, file) = self._find_model(name), location.partition("/")
            missing = 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            return model.handle_get(unquote(revision), unquote(file)) if model else missing
        repository, _, file = path.removeprefix("/datasets/").partition(f"/resolve/{SHA}/")
        content = self.datasets.get(repository, {}).get(unquote(file))
        if content is None:
            return 404, {"error": "no such file"}, {}
        return 200, content, {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}

    def _find_model(self, name: str) -> FakeModel | None:
        """Return the model, or the uploaded repository as a model with one commit."""
        uploaded = self.repositories.get(name)
        return self.models.get(name) if uploaded is None else FakeModel({SHA: uploaded}, {"main": SHA})

    def handle_post(self, path: str, body: bytes, token: str) -> tuple[int, Any]:
        """Create repositories or store committed files; return the status and body of the response."""
        if self.error_status:
            return self.error_status, {"error": "out of order"}
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            self.repositories[name], self.visibility[name] = {}, request["visibility"]
            return 200, {"url": f"{self.address}/{name}"}
        if path == "/api/validate-yaml":  # request that validates the metadata of README.md
            return 200, {"errors": [], "warnings": []}
        time.sleep(self.delay_seconds)
        repository, _, action = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        files = self.repositories[repository]
        if action == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.address}/{repository}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class HubHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, document = hub.handle_post(self.path, body, self.headers.get("Authorization", ""))
            response = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "")
            path = self.path.partition("?")[0]
            status, content, headers = hub.handle_get(path, token)
            response = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(response))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                hub.downloaded_paths.append(path)
                self.wfile.write(response)

        do_HEAD = do_GET  # noqa: N815 (name required by http.server)

        def log_message(self, *_: object) -> None:
            """Suppress request logs."""

    with serve_in_background(HubHandler) as hub.address:
        yield hub


def set_endpoint(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let the Hub clients of this process use another address; they read it from the environment only once."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # it keeps the endpoint
