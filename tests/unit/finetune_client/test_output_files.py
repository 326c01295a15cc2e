"""Tests of copying the output of a job, with an API server that runs programs on a local folder."""

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobSnapshot, JobStatus, NodeStatus, Phase
from finetune_client import output_reader
from finetune_client.async_client import AsyncClient
from finetune_client.client import Client
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_client.output_reader import build_reader_pod
from finetune_client.tar_archive import CopyLimits
from testing.builders.jobs import NOW
from testing.fakes.exec_api import ExecApi
from testing.fakes.http_api import ScriptedFault
from testing.fakes.job_api import NAMESPACE, serve_jobs

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


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ExecApi]:
    monkeypatch.setattr(output_reader, "POLL_SECONDS", 0.01)
    output = tmp_path / "claim"
    (output / "result").mkdir(parents=True)
    (output / "result" / "adapter.bin").write_bytes(os.urandom(300_000))
    (output / "result" / "report.html").write_text("<html>")
    async with serve_jobs(tmp_path, ExecApi(output)) as api:
        api.put_job(ENDED)
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
    content = b"".join([chunk async for chunk in client.read_output_file("bert", "result/adapter.bin")])

    assert content == (api.output / "result" / "adapter.bin").read_bytes()


async def test_the_pod_is_deleted_if_a_file_is_not_read_to_its_end(api: ExecApi, tmp_path: Path) -> None:
    def read_first_chunk() -> bytes:
        with (
            Client(kubeconfig=str(tmp_path / "kubeconfig")) as client,
            closing(client.read_output_file("bert", "result/adapter.bin")) as chunks,
        ):
            return next(chunks)

    assert await asyncio.to_thread(read_first_chunk)
    assert not [key for key in api.objects if key[0] == "pods"]


async def test_a_pod_that_somebody_else_deleted_is_no_error(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    api.faults.append(ScriptedFault("DELETE", "pods", 404))

    await client.download("bert", tmp_path / "copy")

    assert (tmp_path / "copy/report.html").exists()


@pytest.mark.parametrize(("status", "deletions"), [(403, 0), (409, 0), (500, 1), (0, 1)])
async def test_a_pod_is_deleted_if_it_may_exist_after_a_failed_creation(
    status: int, deletions: int, client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    """An object that was rejected, or has the same name, belongs to somebody else."""
    api.rejects_pods = True
    api.faults.append(ScriptedFault("POST", "pods", status))

    with pytest.raises(ClientError, match="which reads the output"):
        await client.download("bert", tmp_path / "copy")

    assert len(api.find_requests("DELETE", "pods")) == deletions


NO_SUCH_FILE = r"tar: .*absent.*No such file"


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        pytest.param("absent", {}, NO_SUCH_FILE, id="missing file"),
        pytest.param("absent", {"archive": b""}, NO_SUCH_FILE, id="program without output"),
        pytest.param(
            "result",
            {"loses_connection": True},
            "the connection was lost before the program ended",
            id="lost connection",
        ),
    ],
)
async def test_a_copy_that_fails_is_reported_and_leaves_nothing(
    path: str, changes: dict[str, Any], message: str, client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    for name, value in changes.items():
        setattr(api, name, value)
    before = list_names(tmp_path)
    with pytest.raises(ClientError, match=message):
        await client.download("bert", tmp_path / "copy", path=path)

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
    before = list_names(tmp_path)

    with pytest.raises(ClientError):
        await client.download("bert", tmp_path / "copy")

    assert list_names(tmp_path) == before


def pack_link(name: str, target: str) -> bytes:
    """Return an archive of the folder `result` and a symbolic link."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for member, kind in (("result", tarfile.DIRTYPE), (name, tarfile.SYMTYPE)):
            info = tarfile.TarInfo(member)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    return archive.getvalue()


async def test_a_link_that_would_leave_the_copy_is_an_error_that_leaves_nothing(
    client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_rsa").write_text("key")
    api.archive = pack_link("result/README.md", "../.ssh/id_rsa")
    before = list_names(tmp_path)

    with pytest.raises(ClientError, match=r"README\.md: is a link to \.\./\.ssh/id_rsa, which is outside of result"):
        await client.download("bert", tmp_path / "new" / "folder" / "adapter")

    assert list_names(tmp_path) == before
    assert not [key for key in api.objects if key[0] == "pods"]


@pytest.mark.parametrize("name", ["result", "result/report.html"])
async def test_a_path_that_is_a_link_in_the_output_is_neither_copied_nor_read(
    name: str, client: AsyncClient, api: ExecApi, tmp_path: Path
) -> None:
    path = api.output / name
    path.rename(api.output / "elsewhere")
    path.symlink_to(api.output / "elsewhere")

    with pytest.raises(ClientError, match="is a link to"):
        await client.download("bert", tmp_path / "copy", path=name)
    with pytest.raises(ClientError, match="is a link to"):
        await anext(client.read_output_file("bert", name))


async def test_a_folder_is_not_read_as_a_file(client: AsyncClient, api: ExecApi) -> None:
    with pytest.raises(ClientError, match="result: is a folder in the output"):
        await anext(client.read_output_file("bert", "result"))


async def test_links_of_the_user_lead_to_the_copy(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "models").symlink_to("disk")
    (tmp_path / "latest").symlink_to("disk/new")

    await client.download("bert", tmp_path / "models" / "adapter")
    await client.download("bert", tmp_path / "latest")

    assert list_names(tmp_path / "disk") == ["adapter", "new"]
    assert list_names(tmp_path / "disk" / "new") == ["adapter.bin", "report.html"]


async def test_a_copy_above_the_limits_is_refused(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"more than 1 entries or 1099511627776 bytes, ask for more$"):
        await client.download("bert", tmp_path / "copy", limits=CopyLimits(max_entries=1, remedy=", ask for more"))

    assert not (tmp_path / "copy").exists()


async def test_an_existing_destination_is_not_replaced(client: AsyncClient, api: ExecApi, tmp_path: Path) -> None:
    (tmp_path / "copy").write_text("mine")

    with pytest.raises(ClientError, match="copy: exists already"):
        await client.download("bert", tmp_path / "copy")

    assert not api.programs


@pytest.mark.parametrize("path", ["/etc/passwd", "../other-job/result", "result/../../x"])
async def test_a_path_outside_of_the_output_is_rejected(path: str, client: AsyncClient, api: ExecApi) -> None:
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
