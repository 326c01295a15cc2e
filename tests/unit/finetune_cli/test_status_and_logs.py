"""`finetune status` and `finetune logs` against an API server in memory, as their users start them."""

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
from testing.fakes.http_api import HttpApi, serving

RUNNING = JobStatus(
    phase=Phase.RUNNING,
    attempt=2,
    attempts=(AttemptRecord(attempt=2, state=AttemptState.RUNNING, start_time=NOW),),
    conditions=(Condition(type="Running", status="True", last_transition_time=NOW, reason="Running"),),
    display=Display(nodes="2/2", loss="1.312"),
)


class Api(HttpApi):
    """With logs of pods."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/log"):
            follow = request.query.get("follow", "false").lower() == "true"
            return web.Response(text=f"{request.path} follow={follow}\n")
        return await super().handle(request)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """Serves job team/bert; the kubeconfig's context is of namespace team."""
    api = Api()
    created = {"name": "bert", "creationTimestamp": NOW.isoformat()}
    body = {**job_body(), "metadata": created, "status": render_status(RUNNING)}
    api.put("finetunejobs", body, namespace="team")
    async with serving(api) as url:
        config = {
            "current-context": "dev",
            "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev", "namespace": "team"}}],
            "clusters": [{"name": "dev", "cluster": {"server": url}}],
            "users": [{"name": "dev", "user": {"token": "t"}}],
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        yield api


async def finetune(folder: Path, *arguments: str) -> Result:
    """In a thread, because the API server runs in this one."""
    config = ("--kubeconfig", str(folder / "kubeconfig"))
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *config])


async def test_status_tells_a_job_of_the_contexts_namespace(api: Api, tmp_path: Path) -> None:
    said = await finetune(tmp_path, "status", "bert")

    assert said.exit_code == 0, said.output
    assert said.stdout.startswith("Job    team/bert, ")
    assert "Phase  Running\n" in said.stdout


async def test_status_without_a_name_lists_all_jobs(api: Api, tmp_path: Path) -> None:
    said = await finetune(tmp_path, "status", "-n", "team")

    assert said.exit_code == 0, said.output
    assert [line.split()[0] for line in said.stdout.splitlines()] == ["NAME", "bert"]


async def test_watch_tells_every_change_until_the_end(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune_cli.status.WATCH_SECONDS", 0.05)
    watching = asyncio.create_task(finetune(tmp_path, "status", "bert", "--watch"))
    async with asyncio.timeout(30):
        while len(api.asked("GET", "finetunejobs")) < 3:  # noqa: ASYNC110  another thread asks
            await asyncio.sleep(0.05)
    body = api.objects["finetunejobs", "team", "bert"]
    done = RUNNING.model_copy(update={"phase": Phase.COMPLETE, "completion_time": NOW})
    api.put("finetunejobs", {**body, "status": render_status(done)}, namespace="team")

    said = await watching

    assert said.exit_code == 0, said.output
    phases = [line.split()[1] for line in said.stdout.splitlines() if line.startswith("Phase")]
    assert phases == ["Running", "Complete"]


async def test_logs_are_those_of_the_present_attempts_pod(api: Api, tmp_path: Path) -> None:
    said = await finetune(tmp_path, "logs", "bert", "--node", "1", "-f")

    assert said.exit_code == 0, said.output
    assert said.stdout == "/api/v1/namespaces/team/pods/bert-2-1/log follow=True\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("status", "other"),
            "finetunejobs.finetune.dev team/other: finetunejobs 'other' not found",
            id="no such job",
        ),
        pytest.param(("logs", "bert", "--node", "2"), "--node 2: bert has nodes 0 to 1", id="no such node"),
        pytest.param(
            ("status", "--context", "prod"),
            "no access to a cluster: Invalid kube-config file. Expected object with name prod in "
            "{kubeconfig}/contexts list",
            id="no such context",
        ),
    ],
)
async def test_what_is_not_there_is_named(arguments: tuple[str, ...], expected: str, api: Api, tmp_path: Path) -> None:
    said = await finetune(tmp_path, *arguments)

    assert isinstance(said.exception, BadInput)
    assert said.exception.problems == (expected.format(kubeconfig=tmp_path / "kubeconfig"),)


async def test_an_api_server_that_is_away_is_said_in_a_line(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    path.write_text(yaml.safe_dump(config))

    said = await finetune(tmp_path, "status")

    assert isinstance(said.exception, BadInput)
    expected = "finetunejobs.finetune.dev of namespace team: the API server does not answer"
    assert said.exception.problems[0].startswith(expected)
