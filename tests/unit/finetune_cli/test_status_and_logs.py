"""Tests of the commands `finetune status` and `finetune logs` with an in-memory API server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner, Result

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Condition, Display, JobStatus, Phase
from finetune_cli.app import app
from finetune_cli.errors import BadInput
from finetune_operator.controller.reconcile import render_status
from testing.builders.job_files import job_body
from testing.builders.jobs import NOW
from testing.fakes.http_api import HttpApi, serve_api

RUNNING_STATUS = JobStatus(
    phase=Phase.RUNNING,
    attempt=2,
    attempts=(AttemptRecord(attempt=2, state=AttemptState.RUNNING, start_time=NOW),),
    conditions=(Condition(type="Running", status="True", last_transition_time=NOW, reason="Running"),),
    display=Display(nodes="2/2", loss="1.312"),
)


class HttpApiWithLogs(HttpApi):
    """In-memory API server that also serves pod logs."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/log"):
            follow = request.query.get("follow", "false").lower() == "true"
            return web.Response(text=f"{request.path} follow={follow}\n")
        return await super().handle(request)


@pytest.fixture
async def api_server(tmp_path: Path) -> AsyncIterator[HttpApiWithLogs]:
    """Serve the job team/bert and write a kubeconfig whose context has the namespace team."""
    api_server = HttpApiWithLogs()
    metadata = {"name": "bert", "creationTimestamp": NOW.isoformat()}
    body = {**job_body(), "metadata": metadata, "status": render_status(RUNNING_STATUS)}
    api_server.put("finetunejobs", body, namespace="team")
    async with serve_api(api_server) as url:
        config = {
            "current-context": "dev",
            "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev", "namespace": "team"}}],
            "clusters": [{"name": "dev", "cluster": {"server": url}}],
            "users": [{"name": "dev", "user": {"token": "t"}}],
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        yield api_server


async def run_finetune(folder: Path, *arguments: str) -> Result:
    """Run the command in another thread, because the API server uses the event loop of this thread."""
    config = ("--kubeconfig", str(folder / "kubeconfig"))
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *config])


async def test_status_describes_a_job_in_the_namespace_of_the_context(
    api_server: HttpApiWithLogs, tmp_path: Path
) -> None:
    result = await run_finetune(tmp_path, "status", "bert")

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Job    team/bert, ")
    assert "Phase  Running\n" in result.stdout


async def test_status_without_a_name_lists_all_jobs(api_server: HttpApiWithLogs, tmp_path: Path) -> None:
    result = await run_finetune(tmp_path, "status", "-n", "team")

    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["NAME", "bert"]


async def test_watch_prints_every_change_until_the_job_ends(
    api_server: HttpApiWithLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune_cli.status.WATCH_SECONDS", 0.05)
    watch_task = asyncio.create_task(run_finetune(tmp_path, "status", "bert", "--watch"))
    async with asyncio.timeout(30):
        while len(api_server.find_requests("GET", "finetunejobs")) < 3:  # noqa: ASYNC110  another thread sends the requests
            await asyncio.sleep(0.05)
    body = api_server.objects["finetunejobs", "team", "bert"]
    complete_status = RUNNING_STATUS.model_copy(update={"phase": Phase.COMPLETE, "completion_time": NOW})
    api_server.put("finetunejobs", {**body, "status": render_status(complete_status)}, namespace="team")

    result = await watch_task

    assert result.exit_code == 0, result.output
    phases = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("Phase")]
    assert phases == ["Running", "Complete"]


async def test_logs_are_read_from_the_pod_of_the_current_attempt(api_server: HttpApiWithLogs, tmp_path: Path) -> None:
    result = await run_finetune(tmp_path, "logs", "bert", "--node", "1", "-f")

    assert result.exit_code == 0, result.output
    assert result.stdout == "/api/v1/namespaces/team/pods/bert-2-1/log follow=True\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("status", "other"),
            "finetunejobs.finetune.dev team/other: finetunejobs 'other' not found",
            id="unknown job",
        ),
        pytest.param(("logs", "bert", "--node", "2"), "--node 2: bert has nodes 0 to 1", id="unknown node"),
        pytest.param(
            ("status", "--context", "prod"),
            "no access to a cluster: Invalid kube-config file. Expected object with name prod in "
            "{kubeconfig}/contexts list",
            id="unknown context",
        ),
    ],
)
async def test_missing_job_node_or_context_is_reported_by_name(
    arguments: tuple[str, ...], expected: str, api_server: HttpApiWithLogs, tmp_path: Path
) -> None:
    result = await run_finetune(tmp_path, *arguments)

    assert isinstance(result.exception, BadInput)
    assert result.exception.problems == (expected.format(kubeconfig=tmp_path / "kubeconfig"),)


async def test_unreachable_api_server_is_reported_in_one_line(api_server: HttpApiWithLogs, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    path.write_text(yaml.safe_dump(config))

    result = await run_finetune(tmp_path, "status")

    assert isinstance(result.exception, BadInput)
    expected = "finetunejobs.finetune.dev of namespace team: the API server does not answer"
    assert result.exception.problems[0].startswith(expected)
