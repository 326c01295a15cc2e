"""Tests of `finetune report`, `cp` and `logs --saved` with a hostile output, and an API server in this process."""

import asyncio
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobSnapshot, JobStatus, Phase
from finetune_cli.app import app
from finetune_cli.cluster.report import build_report_page
from finetune_cli.errors import BadInput
from finetune_client import output_reader
from finetune_client.errors import ClientError
from testing.builders.jobs import NOW
from testing.fakes.exec_api import ExecApi
from testing.fakes.job_api import serve_jobs

ENDED = JobStatus(
    phase=Phase.COMPLETE,
    attempt=1,
    attempts=(AttemptRecord(attempt=1, state=AttemptState.SUCCEEDED),),
    completion_time=NOW,
    snapshot=JobSnapshot(image="registry.example/trainer:1"),
)
HOSTILE_PAGE = """<html><head><meta http-equiv="refresh" content="0;url=https://evil.example">
<link rel="preconnect" href="https://evil.example"><LINK rel=stylesheet href=//evil.example/a.css></head><body>
"></iframe><script>alert(1)</script><form action="https://evil.example"><img src="https://evil.example/x.png">
<svg><path d="M0 0"/></svg></body></html>"""


class Elements(HTMLParser):
    """Collects the start tags of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element."""
        self.found.append((tag, dict(attrs)))


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ExecApi]:
    monkeypatch.setattr(output_reader, "POLL_SECONDS", 0.01)
    output = tmp_path / "claim"
    (output / "result").mkdir(parents=True)
    (output / "result" / "report.html").write_text(HOSTILE_PAGE)
    (output / "logs" / "attempt-1").mkdir(parents=True)
    async with serve_jobs(tmp_path, ExecApi(output)) as api:
        api.put_job(ENDED)
        yield api


async def run_finetune(folder: Path, command: str, *arguments: str) -> Result:
    """Run the command in another thread, because the API server uses the event loop of this thread."""
    config = ("--kubeconfig", str(folder / "kubeconfig"))
    return await asyncio.to_thread(CliRunner().invoke, app, [command, *config, *arguments])


async def test_the_opened_report_is_in_a_frame_without_scripts_forms_and_network(
    api: ExecApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    file = tmp_path / "page.html"

    result = await run_finetune(tmp_path, "report", "bert", "--output", str(file))

    assert result.exit_code == 0, result.output
    assert opened == [file.as_uri()]
    elements = Elements(file.read_text()).found
    assert [tag for tag, _ in elements] == ["meta", "meta", "meta", "title", "iframe"]
    policy = next(
        attributes["content"] for _, attributes in elements if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert set(re.split("; ", policy)) == {
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    }
    frame = elements[-1][1]
    assert frame["sandbox"] is None  # an empty list of permissions
    assert set(frame) == {"sandbox", "title", "style", "srcdoc"}
    shown = [tag for tag, _ in Elements(frame["srcdoc"] or "").found]
    assert "svg" in shown
    assert "link" not in shown


def test_the_frame_shows_the_report_of_the_trainer_unchanged() -> None:
    report = "<!doctype html><title>a &amp; b</title><style>td { color: #fff }</style><p title='x'>\"linked\" 1 &lt; 2"

    frame = Elements(build_report_page("first", report)).found[-1][1]

    assert frame["srcdoc"] == report


async def test_an_existing_report_is_not_replaced(api: ExecApi, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")

    result = await run_finetune(tmp_path, "report", "bert", "--output", str(tmp_path / "page.html"))

    assert isinstance(result.exception, BadInput)
    assert (tmp_path / "page.html").read_text() == "mine"


async def test_the_limits_of_a_copy_are_options(api: ExecApi, tmp_path: Path) -> None:
    (api.output / "result" / "adapter.bin").write_bytes(b"x")

    refused = await run_finetune(tmp_path, "cp", "bert", str(tmp_path / "copy"), "--max-entries", "1")
    assert isinstance(refused.exception, ClientError)
    assert str(refused.exception).endswith("; raise the limit with --max-entries or --max-size")
    assert not (tmp_path / "copy").exists()

    assert (await run_finetune(tmp_path, "cp", "bert", str(tmp_path / "copy"), "--max-entries", "2")).exit_code == 0


@pytest.mark.parametrize("content", [b"a\xff\x1b[2J\r\nlast", b"x" * 3_000_000], ids=["bytes", "long line"])
async def test_the_bytes_of_a_saved_log_are_unchanged_in_a_pipe(content: bytes, api: ExecApi, tmp_path: Path) -> None:
    (api.output / "logs" / "attempt-1" / "node-0.log").write_bytes(content)

    result = await run_finetune(tmp_path, "logs", "bert", "--saved")

    assert result.stdout_bytes == content


async def test_a_saved_log_that_is_a_link_is_not_printed(api: ExecApi, tmp_path: Path) -> None:
    (api.output / "logs" / "attempt-1" / "node-0.log").symlink_to("/etc/passwd")

    result = await run_finetune(tmp_path, "logs", "bert", "--saved")

    assert isinstance(result.exception, ClientError)
    assert not result.stdout_bytes
