"""Tests of signals that arrive while a command has temporary objects, with an in-memory API server."""

import asyncio
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from finetune_api.v1alpha1.status import JobSnapshot, JobStatus, Phase
from finetune_client.pod_exec import PROTOCOL, STDOUT
from testing.builders.job_files import job_body, write_yaml
from testing.builders.jobs import NOW
from testing.fakes.job_api import JobApi, serve_jobs
from testing.processes.waiting import wait_in_event_loop

ENDED = JobStatus(phase=Phase.COMPLETE, attempt=1, completion_time=NOW, snapshot=JobSnapshot(image="trainer:1"))
CP, DOCTOR, SAVED_LOGS = ("cp", "bert", "copy"), ("doctor", "job.yaml"), ("logs", "bert", "--saved")
PATHS = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SlowApi(JobApi):
    """API server whose pods never start. post_seconds, delete_seconds: time until it responds."""

    post_seconds = 0.0
    delete_seconds = 0.0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Delay the response to the creation or deletion of a pod; respond to other requests of doctor briefly."""
        if request.path.endswith(("/nodes", "/leases", "/persistentvolumeclaims")):
            return web.json_response({"metadata": {}, "items": []})
        if request.path == "/version" or "selfsubjectaccessreviews" in request.path:
            return web.json_response({})
        response = await super().handle(request)
        if request.path.split("/")[-1] == "pods" and request.method == "POST":
            await asyncio.sleep(self.post_seconds)
        if request.method == "DELETE":
            await asyncio.sleep(self.delete_seconds)
        return response

    @property
    def pods(self) -> list[str]:
        """Names of the pods that exist."""
        return [name for plural, _, name in self.objects if plural == "pods"]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[SlowApi]:
    write_yaml(tmp_path, job_body(name="bert", numNodes=1, image="trainer:1"))
    async with serve_jobs(tmp_path, SlowApi()) as api:
        api.put_job(ENDED)
        yield api


async def start(
    folder: Path, *arguments: str, preexec_fn: Callable[[], object] | None = None
) -> asyncio.subprocess.Process:
    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests inherited, for example from nohup
        if preexec_fn is not None:
            preexec_fn()

    command, *rest = arguments
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "finetune_cli", command, "--kubeconfig", "kubeconfig", *rest),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PATHS},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=prepare,
    )


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def interrupt(api: SlowApi, process: asyncio.subprocess.Process, *numbers: signal.Signals) -> str:
    """Send signals, the first one after a pod was created, and return the error output of the process."""
    await wait_in_event_loop(lambda: api.pods or process.returncode is not None)
    for number in numbers:
        process.send_signal(number)
        await asyncio.sleep(0.2)
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    return errors.decode()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("arguments", [CP, DOCTOR, SAVED_LOGS], ids=lambda arguments: arguments[0])
async def test_a_signal_ends_a_command_after_its_pods_and_folders_are_deleted(
    arguments: tuple[str, ...], number: signal.Signals, api: SlowApi, tmp_path: Path
) -> None:
    before = list_names(tmp_path)
    process = await start(tmp_path, *arguments)

    errors = await interrupt(api, process, number)

    assert (process.returncode, api.pods, "Traceback" in errors) == (128 + number, [], False), errors
    assert list_names(tmp_path) == before
    assert [key for key in api.objects if key[0] == "finetunejobs"], "the job stays"


@pytest.mark.parametrize("arguments", [CP, DOCTOR], ids=lambda arguments: arguments[0])
async def test_a_pod_whose_creation_is_in_progress_is_deleted(
    arguments: tuple[str, ...], api: SlowApi, tmp_path: Path
) -> None:
    api.post_seconds = 1.0
    process = await start(tmp_path, *arguments)

    errors = await interrupt(api, process, signal.SIGTERM)

    assert (process.returncode, api.pods) == (128 + signal.SIGTERM, []), errors
    announced = "starting pods with the image trainer:1 (at most 300 s)" in errors
    assert announced == (arguments is DOCTOR), "the image is printed before a pod starts"


class StreamingApi(SlowApi):
    """API server whose pods run, and send the begin of an archive that does not end."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Send a part of an archive, or respond as the base class does with a running pod."""
        if request.path.endswith("/exec"):
            socket = web.WebSocketResponse(protocols=(PROTOCOL,))
            await socket.prepare(request)
            member = tarfile.TarInfo("result/adapter.bin")
            member.size = 10**6
            await socket.send_bytes(bytes([STDOUT]) + member.tobuf() + bytes(50_000))
            await asyncio.sleep(60)
        response = await super().handle(request)
        if request.method == "POST" and request.path.endswith("/pods"):
            self.put_pod((await request.json())["metadata"]["name"], phase="Running")
        return response


async def test_an_unfinished_copy_is_removed(tmp_path: Path) -> None:
    async with serve_jobs(tmp_path, StreamingApi()) as api:
        api.put_job(ENDED)
        process = await start(tmp_path, *CP)
        await wait_in_event_loop(lambda: list(tmp_path.glob(".copy-*/result/adapter.bin")))

        errors = await interrupt(api, process, signal.SIGTERM)

    assert (process.returncode, api.pods) == (128 + signal.SIGTERM, []), errors
    assert list_names(tmp_path) == ["kubeconfig"]


async def test_a_second_signal_ends_the_command_at_once(api: SlowApi, tmp_path: Path) -> None:
    api.delete_seconds = 60
    process = await start(tmp_path, *CP)

    errors = await interrupt(api, process, signal.SIGINT, signal.SIGTERM)

    assert (process.returncode, errors) == (-signal.SIGTERM, "")


async def test_a_hangup_that_nohup_ignores_stays_ignored(api: SlowApi, tmp_path: Path) -> None:
    process = await start(tmp_path, *CP, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))

    errors = await interrupt(api, process, signal.SIGHUP, signal.SIGTERM)

    assert (process.returncode, api.pods) == (128 + signal.SIGTERM, []), errors


async def test_a_login_plugin_does_not_delay_the_end(tmp_path: Path) -> None:
    program = ["-c", "echo > started; exec sleep 60"]
    login = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": program}
    config = {
        "current-context": "dev",
        "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev"}}],
        "clusters": [{"name": "dev", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "dev", "user": {"exec": login}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    process = await start(tmp_path, *CP)
    await wait_in_event_loop(lambda: (tmp_path / "started").exists())

    process.send_signal(signal.SIGTERM)

    assert await asyncio.wait_for(process.wait(), 10) == 128 + signal.SIGTERM
