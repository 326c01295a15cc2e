"""Runs the example notebook in a Jupyter kernel, with an in-memory API server."""

import asyncio
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Phase, Progress
from testing.builders.jobs import NOW
from testing.fakes.job_api import NAMESPACE, JobApi, serve_jobs

NOTEBOOK = Path(__file__).parents[3] / "integrations" / "notebook" / "first.ipynb"
FAST_POLLING = "import finetune_client.async_client\n\nfinetune_client.async_client.POLL_SECONDS = 0.05"
TIMEOUT_SECONDS = 120


def build_status(phase: Phase, step: int, loss: float) -> JobStatus:
    record = AttemptRecord(attempt=0, state=AttemptState.RUNNING, start_time=NOW)
    progress = Progress(step=step, total_steps=10, loss=loss)
    completion_time = NOW if phase is Phase.COMPLETE else None
    return JobStatus(phase=phase, attempt=0, attempts=(record,), progress=progress, completion_time=completion_time)


async def run_job(api: JobApi) -> None:
    """Report progress of the job that the notebook creates, each time after the notebook has read the last report."""
    while ("finetunejobs", NAMESPACE, "first") not in api.objects:  # noqa: ASYNC110  created by another process
        await asyncio.sleep(0.02)
    for step, loss in ((1, 3.0), (5, 1.5)):
        api.put_job(build_status(Phase.RUNNING, step, loss), name="first", numNodes=2)
        expected = len(api.find_requests("GET", "finetunejobs")) + 2
        while len(api.find_requests("GET", "finetunejobs")) < expected:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    api.put_job(build_status(Phase.COMPLETE, 10, 1.0), name="first", numNodes=2)


def list_html(cell: Any) -> list[str]:
    """Return the HTML outputs of a cell."""
    return [output["data"]["text/html"] for output in cell["outputs"] if "text/html" in output.get("data", {})]


async def test_notebook_shows_progress_and_loss_of_its_job_in_one_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FAST_POLLING))
    async with serve_jobs(tmp_path, JobApi()) as api, asyncio.timeout(TIMEOUT_SECONDS):
        api.logs["first-0-0"] = ["2026-11-27T10:00:00.000000000Z loss 1.0"]
        job = asyncio.create_task(run_job(api))
        await NotebookClient(notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3").async_execute()
        await job

    _, _, created, shown, log, last = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert "<b>team/first</b>" in list_html(created)[0]
    (progress,) = list_html(shown)  # one output, which was updated
    assert "Complete" in progress
    assert "loss 3 to 1, steps 1 to 10" in progress
    assert log["outputs"][0]["text"] == "loss 1.0\n"
    assert "Complete" in list_html(last)[0]


def test_notebook_is_stored_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]

    assert len(cells) == 5
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []
