"""Tests of copying the output of a job, with an API server that runs programs on a local folder."""

import asyncio
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobSnapshot, JobStatus, NodeStatus, Phase
from finetune_client import output_reader
from finetune_client.async_client import AsyncClient
from finetune_client.client import Client
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_client.output_reader import build_reader_pod
from finetune_client.pod_exec import PROTOCOL, STATUS, STDERR, STDOUT
from testing.builders.jobs import NOW
from testing.fakes.http_api import ScriptedFault, build_status_response
from testing.fakes.job_api import NAMESPACE, JobApi, serve_jobs

ENDED = JobStatus(
    phase=Phase.COMPLETE,
    attempt=1,
    completion_time=NOW,
    snapshot=JobSnapshot(image="registry.example/trainer:1", image_digest="registry.example/trainer@sha256:1"),
)
RUNNING = ENDED.model_copy(
    update={
        "phase": Phase.RUNNING,
        "completion_time": None,
        "attempts": (AttemptRecord(attempt=1, state=AttemptState.RUNNING),),
        "nodes": (NodeStatus(node_rank=0, pod_name="bert-1-0", phase="Running"),),
    }
)


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


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ExecApi]:
    monkeypatch.setattr(output_reader, "POLL_SECONDS", 0.01)
    output = tmp_path / "claim"
    (output / "result").mkdir(parents=True)
    (output / "result" / "adapter.bin").write_bytes(os.urandom(300_000))
    (output / "result" / "report.html").write_text("<html>")
    async with serve_jobs(tmp_path, ExecApi(output)) as api:
        yield api


@pytest.fixture
async def client(api: ExecApi, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        yield client


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_the_result_of_an_ended_job_is_copied_by_a_pod_that_is_deleted(
    client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    api.put_job(ENDED)
    copy = await client.download("bert", tmp_path / "new" / "adapter")

    assert (copy / "adapter.bin").read_bytes() == (api.output / "result" / "adapter.bin").read_bytes()
    assert list_names(tmp_path / "new") == ["adapter"]
    assert not [key for key in api.objects if key[0] == "pods"]


async def test_a_running_pod_of_the_job_is_used_if_there_is_one(
    client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    api.put_job(RUNNING)
    api.put_pod("bert-1-0", phase="Running")

    await client.download("bert", tmp_path / "report.html", path="result/report.html")

    assert (tmp_path / "report.html").read_text() == "<html>"
    assert [pod for pod, _ in api.programs] == ["bert-1-0"]


async def test_a_file_is_read_in_chunks(client: AsyncClient, api: ExecApi) -> None:
    api.put_job(ENDED)

    content = b"".join([chunk async for chunk in client.read_output_file("bert", "result/adapter.bin")])

    assert content == (api.output / "result" / "adapter.bin").read_bytes()


async def test_the_pod_is_deleted_if_a_file_is_not_read_to_its_end(api: ExecApi, tmp_path: Path) -> None:
    api.put_job(ENDED)

    def read_first_chunk() -> bytes:
        with (
            Client(kubeconfig=str(tmp_path / "kubeconfig")) as client,
            closing(client.read_output_file("bert", "result/adapter.bin")) as chunks,
        ):
            return next(chunks)

    assert await asyncio.to_thread(read_first_chunk)
    assert not [key for key in api.objects if key[0] == "pods"]


async def test_a_pod_that_somebody_else_deleted_is_no_error(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    api.put_job(ENDED)
    api.faults.append(ScriptedFault("DELETE", "pods", 404))

    await client.download("bert", tmp_path / "copy")

    assert (tmp_path / "copy/report.html").exists()


@pytest.mark.parametrize(("status", "deletions"), [(403, 0), (409, 0), (500, 1), (0, 1)])
async def test_a_pod_is_deleted_if_it_may_exist_after_a_failed_creation(
    status: int, deletions: int, client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    """An object that was rejected, or has the same name, belongs to somebody else."""
    api.put_job(ENDED)
    api.rejects_pods = True
    api.faults.append(ScriptedFault("POST", "pods", status))

    with pytest.raises(ClientError, match="which reads the output"):
        await client.download("bert", tmp_path / "copy")

    assert len(api.find_requests("DELETE", "pods")) == deletions


async def test_a_missing_file_is_reported_and_leaves_nothing(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    api.put_job(ENDED)
    before = list_names(tmp_path)

    with pytest.raises(ClientError, match=r"tar: .*absent.*No such file"):
        await client.download("bert", tmp_path / "copy", path="absent")

    assert list_names(tmp_path) == before


async def test_a_lost_connection_leaves_nothing(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    api.put_job(ENDED)
    api.loses_connection = True
    before = list_names(tmp_path)

    with pytest.raises(ClientError, match="the connection was lost before the program ended"):
        await client.download("bert", tmp_path / "copy")

    assert list_names(tmp_path) == before
    assert not [key for key in api.objects if key[0] == "pods"]


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "result/../../escaped"])
async def test_an_archive_with_paths_outside_of_the_destination_is_rejected(
    name: str, client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    api.archive = archive.getvalue()
    api.put_job(ENDED)
    before = list_names(tmp_path)

    with pytest.raises(ClientError):
        await client.download("bert", tmp_path / "copy")

    assert list_names(tmp_path) == before


async def test_an_existing_destination_is_not_replaced(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    api.put_job(ENDED)
    (tmp_path / "copy").write_text("mine")

    with pytest.raises(ClientError, match="copy: exists already"):
        await client.download("bert", tmp_path / "copy")

    assert not api.programs


@pytest.mark.parametrize("path", ["/etc/passwd", "../other-job/result", "result/../../x"])
async def test_a_path_outside_of_the_output_is_rejected(path: str, client: AsyncClient, api: ExecApi) -> None:
    api.put_job(ENDED)

    with pytest.raises(ClientError, match="expected a path below the output of the job"):
        await anext(client.read_output_file("bert", path))

    assert not api.programs


async def test_a_job_without_output_is_reported(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    program: dict[str, Any] = {"command": {"script": "train.py"}, "image": "registry.example/own:1"}
    api.put_job(ENDED, model=None, dataset=None, sft=None, lora=None, output=None, **program)

    with pytest.raises(ClientError, match=r"bert has no spec\.output"):
        await client.download("bert", tmp_path / "copy")


async def test_the_reader_pod_is_restricted_and_belongs_to_the_job(api: ExecApi) -> None:
    stored = api.put_job(ENDED, podTemplate={"nodeSelector": {"zone": "a"}})

    pod = build_reader_pod(Job.parse(stored), suffix="abc")

    container: dict[str, Any] = pod["spec"]["containers"][0]
    assert pod["metadata"]["name"] == "bert-output-abc"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == stored["metadata"]["uid"]
    assert "controller" not in pod["metadata"]["ownerReferences"][0]
    assert container["image"] == "registry.example/trainer@sha256:1"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["volumeMounts"] == [{"name": "output", "mountPath": "/output", "readOnly": True}]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["nodeSelector"] == {"zone": "a"}
    assert not pod["spec"]["automountServiceAccountToken"]
    assert stored["metadata"]["namespace"] == NAMESPACE


async def test_a_program_without_output_is_reported_by_its_own_error(
    client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    api.put_job(ENDED)
    api.archive = b""

    with pytest.raises(ClientError, match=r"tar: .*absent.*No such file"):
        await client.download("bert", tmp_path / "copy", path="absent")
