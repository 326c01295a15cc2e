"""In-memory API server with a job, pod logs and a kubeconfig, for tests of the client and the command line."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from aiohttp import web

from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.controller.reconcile import render_status
from testing.builders.job_files import job_body
from testing.builders.jobs import NOW
from testing.fakes.http_api import HttpApi, RawBody, build_status_response, serve_api

NAMESPACE = "team"


class JobApi(HttpApi):
    """API server that also serves the logs in `logs`, by pod name; a pod without logs is waiting to start.

    log_requests: query parameters of the requests for logs, by pod name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, list[str]] = {}
        self.log_requests: list[tuple[str, dict[str, str]]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve a log, or any other resource as the base class does."""
        parts = request.path.split("/")
        if parts[-1] != "log":
            return await super().handle(request)
        pod = parts[-2]
        self.log_requests.append((pod, dict(request.query)))
        if pod not in self.logs:
            return build_status_response(400, "BadRequest", f'container "trainer" in pod "{pod}" is waiting to start')
        return web.Response(text="".join(f"{line}\n" for line in self.logs[pod]))

    def put_job(self, status: JobStatus | None = None, *, name: str = "bert", **fields: Any) -> RawBody:
        """Create or replace a job of the namespace; `fields` belong to its spec."""
        metadata = {"name": name, "creationTimestamp": NOW.isoformat()}
        body = {**job_body(name=name, **fields), "metadata": metadata, "status": render_status(status or JobStatus())}
        return self.put("finetunejobs", body, namespace=NAMESPACE)

    def put_pod(self, name: str, *, phase: str) -> None:
        """Create or replace a pod in this phase."""
        self.put("pods", {"metadata": {"name": name}, "status": {"phase": phase}}, namespace=NAMESPACE)

    def put_event(self, name: str, regarding: RawBody, *, time: datetime, **fields: Any) -> None:
        """Create an event about an object."""
        body = {"metadata": {"name": name}, "eventTime": time.isoformat(), "regarding": regarding, **fields}
        self.put("events", body, namespace=NAMESPACE)


Api = TypeVar("Api", bound=JobApi)


@asynccontextmanager
async def serve_jobs(folder: Path, api: Api) -> AsyncIterator[Api]:
    """Serve the API, and write a kubeconfig to `folder` whose context has the namespace."""
    async with serve_api(api) as url:
        config = {
            "current-context": "dev",
            "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev", "namespace": NAMESPACE}}],
            "clusters": [{"name": "dev", "cluster": {"server": url}}],
            "users": [{"name": "dev", "user": {"token": "t"}}],
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        yield api
