"""In-memory API server that runs programs of pods on a local folder, for tests that copy the output of a job."""

import asyncio
import json
from pathlib import Path

from aiohttp import web

from finetune_client.pod_exec import PROTOCOL, STATUS, STDERR, STDOUT
from testing.fakes.http_api import build_status_response
from testing.fakes.job_api import JobApi


class ExecApi(JobApi):
    """API server whose pods run at once, and that executes programs on the folder `output` instead of /output.

    archive: output of tar instead of that of the real program.
    """

    def __init__(self, output: Path) -> None:
        super().__init__()
        self.output = output
        self.archive: bytes | None = None
        self.loses_connection = False
        self.rejects_pods = False
        self.programs: list[tuple[str, list[str]]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Execute a program in a pod, or serve any other resource as the base class does."""
        parts = request.path.split("/")
        if parts[-1] == "exec":
            return await self._execute(request, parts[-2])
        if request.method == "POST" and parts[-1] == "pods" and not self.rejects_pods:
            body = await request.json()
            self.put_pod(body["metadata"]["name"], phase="Running")
            self.created = body
            return web.json_response(body, status=201)
        return await super().handle(request)

    async def _execute(self, request: web.Request, pod: str) -> web.StreamResponse:
        if "application/json" in request.headers.get("Accept", ""):  # as the real API server
            return build_status_response(406, "NotAcceptable", "only the following media types are accepted: */*")
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        program = request.query.getall("command")
        self.programs.append((pod, program))
        local = [argument.replace("/output/team/bert", str(self.output)) for argument in program]
        process = await asyncio.create_subprocess_exec(
            *local, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        stdout, stderr = await process.communicate()
        if self.archive is not None:
            stdout = self.archive
        for start in range(0, len(stdout), 1000):
            await socket.send_bytes(bytes([STDOUT]) + stdout[start : start + 1000])
        await socket.send_bytes(bytes([STDERR]) + stderr)
        if not self.loses_connection:
            status = {"status": "Failure", "message": "exit code"} if process.returncode else {"status": "Success"}
            await socket.send_bytes(bytes([STATUS]) + json.dumps(status).encode())
        await socket.close()
        return socket
