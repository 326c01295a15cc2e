"""Tests of the commands that read and control jobs, with an in-memory API server."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Condition, Display, Fault, JobStatus, Phase
from finetune_cli.app import FinetuneGroup, app
from finetune_cli.cluster.logs import parse_ranks, split_lines
from finetune_cli.errors import BadInput
from finetune_client.errors import ClientError, JobFailed, WaitTimeout
from testing.builders.job_files import job_body, write_yaml
from testing.builders.jobs import NOW
from testing.fakes.job_api import NAMESPACE, JobApi, serve_jobs

RUNNING = JobStatus(
    phase=Phase.RUNNING,
    attempt=2,
    attempts=(AttemptRecord(attempt=2, state=AttemptState.RUNNING, start_time=NOW),),
    conditions=(Condition(type="Running", status="True", last_transition_time=NOW, reason="Running"),),
    display=Display(nodes="2/2", loss="1.312"),
)
COMPLETE = RUNNING.model_copy(update={"phase": Phase.COMPLETE, "completion_time": NOW})
FAILED = RUNNING.model_copy(
    update={
        "phase": Phase.FAILED,
        "completion_time": NOW,
        "attempts": (
            AttemptRecord(
                attempt=2,
                state=AttemptState.FAILED,
                start_time=NOW,
                end_time=NOW,
                reason="DatasetError",
                fault=Fault.USER,
                message="row 3",
            ),
        ),
        "conditions": (
            Condition(type="Failed", status="True", last_transition_time=NOW, reason="DatasetError", message="row 3"),
        ),
    }
)


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune_client.async_client.POLL_SECONDS", 0.02)
    monkeypatch.setattr("finetune_operator.kube.api_client.RETRY_DELAYS_SECONDS", (0.001, 0.001))


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[JobApi]:
    async with serve_jobs(tmp_path, JobApi()) as api:
        api.put_job(RUNNING, numNodes=2)
        yield api


async def run_finetune(folder: Path, *arguments: str, text: str = "") -> Result:
    """Run the command in another thread, because the API server uses the event loop of this thread."""
    command, *rest = arguments
    config = ("--kubeconfig", str(folder / "kubeconfig"))
    return await asyncio.to_thread(CliRunner().invoke, app, [command, *config, *rest], input=text)


async def get_output(folder: Path, *arguments: str) -> str:
    """Return the output of a command that succeeds."""
    result = await run_finetune(folder, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.parametrize("name", FinetuneGroup.commands_by_name)
def test_help_of_a_command_in_the_list_is_that_of_its_docstring(name: str) -> None:
    command = FinetuneGroup.commands_by_name[name]
    text = command.load(name).help or ""

    assert text.startswith(command.help.rstrip("."))


def test_help_lists_all_commands() -> None:
    output = CliRunner().invoke(app, ["--help"]).output

    assert [name for name in FinetuneGroup.commands_by_name if f"\n  {name} " not in output] == []


async def test_status_describes_a_job_in_the_namespace_of_the_context(api: JobApi, tmp_path: Path) -> None:
    output = await get_output(tmp_path, "status", "bert")

    assert output.startswith("Job    team/bert, ")
    assert "Phase  Running\n" in output


@pytest.mark.parametrize("output_format", ["json", "yaml"])
async def test_status_prints_the_object_of_the_api_server(output_format: str, api: JobApi, tmp_path: Path) -> None:
    output = await get_output(tmp_path, "status", "bert", "-o", output_format)

    parsed = json.loads(output) if output_format == "json" else yaml.safe_load(output)
    assert parsed == api.objects["finetunejobs", NAMESPACE, "bert"]


async def test_list_prints_a_table_of_all_jobs(api: JobApi, tmp_path: Path) -> None:
    output = await get_output(tmp_path, "list", "-A")

    assert [line.split()[:3] for line in output.splitlines()] == [
        ["NAMESPACE", "NAME", "PHASE"],
        [NAMESPACE, "bert", "Running"],
    ]


async def test_list_prints_names_and_documents_for_scripts(api: JobApi, tmp_path: Path) -> None:
    assert await get_output(tmp_path, "list", "-o", "name") == "bert\n"
    (item,) = json.loads(await get_output(tmp_path, "list", "-o", "json"))["items"]
    assert (item["kind"], item["metadata"]["name"]) == ("FineTuneJob", "bert")


async def test_watch_prints_every_change_until_the_job_ends(api: JobApi, tmp_path: Path) -> None:
    watch_task = asyncio.create_task(run_finetune(tmp_path, "status", "bert", "--watch"))
    async with asyncio.timeout(30):
        while len(api.find_requests("GET", "finetunejobs")) < 3:  # noqa: ASYNC110  another thread sends the requests
            await asyncio.sleep(0.02)
    api.put_job(COMPLETE, numNodes=2)

    result = await watch_task

    assert result.exit_code == 0, result.output
    phases = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("Phase")]
    assert phases == ["Running", "Complete"]


async def test_logs_are_read_from_the_pod_of_the_current_attempt(api: JobApi, tmp_path: Path) -> None:
    api.logs["bert-2-1"] = ["2026-11-27T10:00:00.000000000Z step 1"]

    assert await get_output(tmp_path, "logs", "bert", "--node", "1") == "step 1\n"


async def test_logs_of_several_nodes_begin_with_the_node_rank(api: JobApi, tmp_path: Path) -> None:
    api.logs |= {f"bert-2-{rank}": [f"2026-11-27T10:00:00.000000000Z from {rank}"] for rank in (0, 1)}

    lines = (await get_output(tmp_path, "logs", "bert", "--node", "all", "--timestamps")).splitlines()

    assert sorted(lines) == [
        "[0] 2026-11-27T10:00:00.000000000Z from 0",
        "[1] 2026-11-27T10:00:00.000000000Z from 1",
    ]


async def test_logs_of_a_rank_are_those_of_its_node_without_the_tracebacks_of_other_ranks(
    api: JobApi, tmp_path: Path
) -> None:
    time = "2026-11-27T10:00:00.000000000Z"
    lines = ("step 1", "[rank2]: Traceback", "[rank3]: Traceback", "[rank3]: ValueError")
    api.logs["bert-2-1"] = [f"{time} {line}" for line in lines]
    api.put_job(RUNNING, numNodes=2, nprocPerNode=2)

    assert await get_output(tmp_path, "logs", "bert", "--rank", "2") == "step 1\n[rank2]: Traceback\n"


def test_lines_of_a_file_do_not_depend_on_its_chunks() -> None:
    assert list(split_lines([b"a\nb", b"c\n", b"\nd"])) == [b"a\n", b"bc\n", b"\n", b"d"]


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("0-2,5", (0, 1, 2, 5)), ("1,1", (1,)), ("all", None)], ids=str
)
def test_node_ranks_are_parsed(text: str, ranks: tuple[int, ...] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "0-999999999", "0-9999999"])
def test_invalid_node_ranks_are_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match=f"--node {text}: expected node ranks"):
        parse_ranks(text)


async def test_submit_creates_the_job_and_prints_its_size(api: JobApi, tmp_path: Path) -> None:
    file = write_yaml(tmp_path, job_body(name="second", numNodes=2))

    output = await get_output(tmp_path, "submit", str(file))

    assert output.startswith("team/second created: 2 x ")
    assert ("finetunejobs", NAMESPACE, "second") in api.objects


async def test_submit_of_an_invalid_file_sends_nothing(api: JobApi, tmp_path: Path) -> None:
    file = write_yaml(tmp_path, job_body(numNodes=0))

    result = await run_finetune(tmp_path, "submit", str(file))

    assert isinstance(result.exception, BadInput)
    assert not api.requests


async def test_followed_submit_prints_events_and_progress_and_fails_with_the_job(api: JobApi, tmp_path: Path) -> None:
    file = write_yaml(tmp_path, job_body(name="second", numNodes=2))
    task = asyncio.create_task(run_finetune(tmp_path, "submit", str(file), "--follow"))
    async with asyncio.timeout(30):
        while ("finetunejobs", NAMESPACE, "second") not in api.objects:  # noqa: ASYNC110  sent by another thread
            await asyncio.sleep(0.02)
    uid = api.objects["finetunejobs", NAMESPACE, "second"]["metadata"]["uid"]
    regarding = {"kind": "FineTuneJob", "name": "second", "uid": uid}
    api.put_event("e", regarding, time=datetime.now(UTC) + timedelta(1), reason="DatasetError", note="row 3")
    api.put_job(FAILED, name="second")

    result = await task

    assert isinstance(result.exception, JobFailed)
    assert "DatasetError: row 3" in result.stdout
    assert "Failed  nodes 2/2" in result.stdout


async def test_suspend_and_resume_change_the_job(api: JobApi, tmp_path: Path) -> None:
    assert await get_output(tmp_path, "suspend", "bert") == "bert is being suspended\n"
    assert api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]["suspend"] is True
    assert await get_output(tmp_path, "resume", "bert", "--wait") == "bert runs\n"
    assert api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]["suspend"] is False


@pytest.mark.parametrize("command", ["suspend", "resume"])
async def test_suspend_and_resume_fail_if_the_job_ends_instead(api: JobApi, tmp_path: Path, command: str) -> None:
    suspend = command == "suspend"
    api.put_job(RUNNING if suspend else JobStatus(phase=Phase.SUSPENDED), suspend=not suspend)
    task = asyncio.create_task(run_finetune(tmp_path, command, "bert", "--wait"))
    async with asyncio.timeout(30):
        while api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]["suspend"] is not suspend:  # noqa: ASYNC110  another thread
            await asyncio.sleep(0.02)
    api.put_job(FAILED)

    result = await task

    assert isinstance(result.exception, JobFailed)
    assert not result.stdout


async def test_cancel_asks_for_confirmation_and_ends_the_job(api: JobApi, tmp_path: Path) -> None:
    refused = await run_finetune(tmp_path, "cancel", "bert", text="n\n")
    assert refused.exit_code == 1
    assert "cancel" not in api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]

    assert await get_output(tmp_path, "cancel", "bert", "--yes") == "bert is being cancelled\n"
    assert api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]["cancel"] is True


async def test_delete_of_a_running_job_asks_for_confirmation(api: JobApi, tmp_path: Path) -> None:
    refused = await run_finetune(tmp_path, "delete", "bert", text="n\n")
    assert refused.exit_code == 1
    assert ("finetunejobs", NAMESPACE, "bert") in api.objects

    assert await get_output(tmp_path, "delete", "bert", "--yes") == "bert deleted\n"
    assert ("finetunejobs", NAMESPACE, "bert") not in api.objects


async def test_wait_fails_if_the_job_fails_and_times_out_otherwise(api: JobApi, tmp_path: Path) -> None:
    timed_out = await run_finetune(tmp_path, "wait", "bert", "--timeout", "0.05")
    assert isinstance(timed_out.exception, WaitTimeout)

    api.put_job(FAILED)
    failed = await run_finetune(tmp_path, "wait", "bert")

    assert isinstance(failed.exception, JobFailed)
    assert str(failed.exception) == "bert has failed: DatasetError: row 3"


async def test_why_explains_a_failed_job_on_one_page(api: JobApi, tmp_path: Path) -> None:
    api.put_job(FAILED)

    output = await get_output(tmp_path, "why", "bert")

    assert output.splitlines()[0] == "bert has failed: DatasetError: row 3"
    titles = [line for line in output.splitlines()[1:] if line and not line.startswith(" ")]
    assert titles == ["What happened", "Whose fault", "What to do"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("status", "other"),
            "finetunejobs.finetune.dev team/other: finetunejobs 'other' not found",
            id="unknown job",
        ),
        pytest.param(("logs", "bert", "--node", "2"), "bert has no node 2; its nodes are 0 to 1", id="unknown node"),
        pytest.param(("logs", "bert", "--rank", "9"), "bert has no rank 9; its ranks are 0 to 3", id="unknown rank"),
        pytest.param(
            ("status", "bert", "--context", "prod"),
            "no access to a cluster: kubeconfig: contexts has no entry 'prod'; see kubectl config view",
            id="unknown context",
        ),
    ],
)
async def test_missing_job_node_or_context_is_reported_by_name(
    arguments: tuple[str, ...], expected: str, api: JobApi, tmp_path: Path
) -> None:
    result = await run_finetune(tmp_path, *arguments)

    assert isinstance(result.exception, ClientError)
    assert str(result.exception) == expected


async def test_unreachable_api_server_is_reported_in_one_line(api: JobApi, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    path.write_text(yaml.safe_dump(config))

    result = await run_finetune(tmp_path, "list")

    assert isinstance(result.exception, ClientError)
    expected = "finetunejobs.finetune.dev of namespace team: GET /apis/finetune.dev"
    assert str(result.exception).startswith(expected)
