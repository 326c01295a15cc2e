"""Tests that no command prints a control character of a text that another person or program wrote."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from rich.console import Console
from rich.live import Live

from finetune_api.v1alpha1.status import (
    AttemptRecord,
    AttemptState,
    Condition,
    Display,
    Evidence,
    Fault,
    JobSnapshot,
    JobStatus,
    NodeStatus,
    Phase,
    Progress,
    WaitStatus,
)
from finetune_api.visible_text import escape_controls
from finetune_cli.app import FinetuneGroup, main
from finetune_cli.progress_display import ProgressDisplay
from finetune_cli.terminal import escape_output, open_console
from finetune_supervisor.messages import Degradation
from testing.builders.job_files import job_body, write_yaml
from testing.builders.jobs import NOW
from testing.fakes.job_api import JobApi, serve_jobs

HOSTILE = "x\x1b]52;c;cm0=\x07\x9b2J\x85\x7f\r\u202eb\u2028\u2066\U000e0041z"
SHOWN = escape_controls(HOSTILE)
STATUS = JobStatus(
    phase=Phase.RUNNING,
    attempt=2,
    attempts=(
        AttemptRecord(
            attempt=1,
            state=AttemptState.FAILED,
            start_time=NOW,
            end_time=NOW,
            reason=HOSTILE,
            fault=Fault.USER,
            action=HOSTILE,
            message=HOSTILE,
            evidence=(
                Evidence(
                    node_rank=0,
                    k8s_node=HOSTILE,
                    reason=HOSTILE,
                    error_type=HOSTILE,
                    message=HOSTILE,
                    disruption=HOSTILE,
                ),
            ),
        ),
        AttemptRecord(attempt=2, state=AttemptState.RUNNING, start_time=NOW),
    ),
    conditions=(
        Condition(type="Reconciling", status="True", last_transition_time=NOW, reason=HOSTILE, message=HOSTILE),
        Condition(type=HOSTILE, status="True", last_transition_time=NOW, reason=HOSTILE),
    ),
    waiting=WaitStatus(reason=HOSTILE, message=HOSTILE, since=NOW),
    degraded=(Degradation(reason=HOSTILE, message=HOSTILE),),
    nodes=(NodeStatus(node_rank=0, pod_name=HOSTILE, k8s_node=HOSTILE, phase=HOSTILE),),
    display=Display(nodes=HOSTILE, progress=HOSTILE, loss=HOSTILE, tokens_per_second=HOSTILE, eta=HOSTILE),
    progress=Progress(step=3, last_checkpoint=HOSTILE, ended=HOSTILE),
    snapshot=JobSnapshot(image="registry.example/trainer:1"),
    output=HOSTILE,
)
FAILED = STATUS.model_copy(
    update={
        "phase": Phase.FAILED,
        "completion_time": NOW,
        "conditions": (
            Condition(type="Failed", status="True", last_transition_time=NOW, reason=HOSTILE, message=HOSTILE),
        ),
    }
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "list": ("list",),
    "list all": ("list", "--all-namespaces"),
    "list as json": ("list", "--output", "json"),
    "list as yaml": ("list", "--output", "yaml"),
    "list names": ("list", "--output", "name"),
    "list with a selector": ("list", "--selector", HOSTILE),
    "status": ("status", "bert"),
    "status as json": ("status", "bert", "--output", "json"),
    "status as yaml": ("status", "bert", "--output", "yaml"),
    "status of a failed job": ("status", "failed"),
    "status of an unknown job": ("status", "none"),
    "watch": ("status", "failed", "--watch"),
    "why": ("why", "bert"),
    "why failed": ("why", "failed"),
    "wait": ("wait", "failed"),
    "wait in vain": ("wait", "bert", "--timeout", "0.05"),
    "logs of an unknown node": ("logs", "bert", "--node", f"1{HOSTILE}"),
    "logs of a job that the server rejects": ("logs", "rejected"),
    "top": ("top", "bert"),
    "events": ("events", "bert"),
    "events as json": ("events", "bert", "--output", "json"),
    "events as yaml": ("events", "bert", "--output", "yaml"),
    "suspend": ("suspend", "rejected"),
    "resume": ("resume", "rejected"),
    "cancel": ("cancel", "bert", "--yes"),
    "cancel without confirmation": ("cancel", "bert"),
    "delete": ("delete", "rejected", "--yes"),
    "exec": ("exec", "rejected", "--", "true"),
    "cp": ("cp", "bert:result", "{folder}/copy"),
    "cp of a wrong size": ("cp", "bert", "{folder}/copy", "--max-size", HOSTILE),
    "report": ("report", "bert", "--output", "{folder}/report.html"),
    "doctor": ("doctor",),
    "doctor with a file": ("doctor", "{file}", "--timeout", "1"),
    "submit": ("submit", "{file}"),
    "submit an invalid file": ("submit", "{invalid}"),
    "follow": ("submit", "{finished}", "--follow"),
    "validate": ("validate", "{file}"),
    "validate an invalid file": ("validate", "{invalid}"),
    "validate a file that is absent": ("validate", f"{{folder}}/{HOSTILE}.yaml"),
    "validate no YAML": ("validate", "{no_yaml}"),
    "plan": ("plan", "{file}"),
    "plan as summary": ("plan", "{file}", "--output", "summary"),
    "estimate": ("estimate", "{file}"),
    "run": ("run", "{file}"),
    "convert": ("convert", "{config}"),
    "convert to a summary": ("convert", "{config}", "--output", "summary"),
    "convert to json": ("convert", "{config}", "--output", "json"),
    "convert what is no training": ("convert", "{no_yaml}"),
    "mcp without a cluster": ("mcp", "--context", HOSTILE),
    "half of a surrogate pair": ("status", "--\ud83d"),
    "unknown option": ("status", f"--{HOSTILE}"),
    "unknown command": (HOSTILE,),
    "too many arguments": ("validate", "{file}", HOSTILE),
    "wrong choice": ("list", "--output", HOSTILE),
}


class HostileApi(JobApi):
    """API server whose texts contain control characters, and that rejects changes of the job `rejected`."""

    async def handle(self, request: Any) -> Any:
        from testing.fakes.http_api import build_status_response

        if "rejected" in request.path or "rejected" in request.query_string:
            return build_status_response(403, "Forbidden", HOSTILE)
        return await super().handle(request)


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobApi]:
    monkeypatch.setattr("finetune_client.async_client.POLL_SECONDS", 0.02)
    monkeypatch.setattr("finetune_client.output_reader.START_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr("finetune_client.output_reader.POLL_SECONDS", 0.02)
    monkeypatch.setattr("finetune_operator.kube.api_client.RETRY_DELAYS_SECONDS", (0.001, 0.001))
    async with serve_jobs(tmp_path, HostileApi()) as api:
        for name, status in (("bert", STATUS), ("failed", FAILED)):
            uid = api.put_job(status, name=name, numNodes=1)["metadata"]["uid"]
            regarding = {"kind": "FineTuneJob", "name": name, "uid": uid}
            api.put_event(f"e-{name}", regarding, time=NOW, type=HOSTILE, reason=HOSTILE, note=HOSTILE)
        yield api


def write_files(folder: Path) -> dict[str, str]:
    """Write job files and configs whose texts contain control characters, and return their paths by name."""
    hostile = job_body(name="new", image=f"a{HOSTILE}")
    finished = folder / "finished"
    finished.mkdir()
    (folder / "no.yaml").write_bytes(b"\x1b]0;t\x07: [")
    config = {"base_model": HOSTILE, "datasets": [{"path": f"/data/{HOSTILE}", "type": "alpaca"}], "x": HOSTILE}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return {
        "folder": str(folder),
        "file": str(write_yaml(folder, hostile)),
        "invalid": str(write_yaml(finished, job_body(name=f"n{HOSTILE}", **{HOSTILE: 1}, numNodes=HOSTILE))),
        "finished": str(write_yaml(folder / "finished", job_body(name="failed")).rename(folder / "failed.yaml")),
        "no_yaml": str(folder / "no.yaml"),
        "config": str(folder / "config.yaml"),
    }


def run_main(arguments: list[str]) -> None:
    sys.argv = ["finetune", *arguments]
    # only the main thread can handle signals
    with mock.patch("signal.signal"), contextlib.suppress(SystemExit):
        main()


@pytest.mark.parametrize("case", COMMANDS)
async def test_no_command_prints_a_control_character(
    case: str, api: JobApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_files(tmp_path)
    command, *arguments = (argument.format(**files) if "{" in argument else argument for argument in COMMANDS[case])
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "stdin", StringIO("n\n"))
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))  # main replaces them

    await asyncio.to_thread(run_main, [command, *arguments])

    output = "".join(capsys.readouterr())
    assert output
    assert "Traceback" not in output
    assert escape_controls(output) == output


def test_every_command_is_in_the_table() -> None:
    assert set(FinetuneGroup.commands_by_name) <= {arguments[0] for arguments in COMMANDS.values()}


class Terminal(TextIOWrapper):
    """Standard output that is a terminal, or a pipe."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        self.content = BytesIO()
        super().__init__(self.content, encoding="utf-8", newline="")
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        """Return whether a terminal displays the text."""
        return self.is_terminal

    def read_all(self) -> str:
        """Return what was written."""
        self.flush()
        return self.content.getvalue().decode()


@pytest.mark.parametrize(
    ("is_terminal", "expected"),
    [(True, "\x1b[31mred\x1b[0m \\x1b[2J\\rx\x1b[0m\n"), (False, "\x1b[31mred\x1b[0m \x1b[2J\rx\n")],
    ids=["terminal", "pipe"],
)
async def test_logs_are_escaped_on_a_terminal_only(
    is_terminal: bool, expected: str, api: JobApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.logs["bert-2-0"] = ["2026-11-27T10:00:00.000000000Z \x1b[31mred\x1b[0m \x1b[2J\rx"]
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "stdout", output := Terminal(is_terminal=is_terminal))

    await asyncio.to_thread(run_main, ["logs", "bert"])

    assert output.read_all() == expected


def test_lines_on_a_terminal_contain_only_the_sequences_of_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Terminal()
    console = Console(file=output, force_terminal=True, width=400, _environ={})
    with ProgressDisplay(console) as display:
        display.print_event(NOW, HOSTILE, HOSTILE)
        display.update(STATUS)
        display.print_log(f"\x1b[32mgreen{HOSTILE}")

    text = output.read_all()
    assert SHOWN in text
    assert "\x1b[32mgreen" in text
    assert "]52;" not in text.replace("\\x1b]52;", "")
    assert not set(text) & set("\x07\x9b\x85\u202e\u2066")


def test_a_live_display_keeps_its_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "stdout", output := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    escape_output()
    with Live("text", console=open_console(), auto_refresh=False):
        print("\x9bx")

    text = output.read_all()
    assert "\x1b[?25l" in text  # hides the cursor
    assert "\\x1b" not in text
