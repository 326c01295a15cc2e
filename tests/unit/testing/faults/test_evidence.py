"""Test of the evidence that is saved for a deviating run while the cluster is unreachable."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testing.faults import evidence
from testing.faults.job_recorder import RecordedStep, StatusChange

BEGAN = "2026-11-22T20:47:24+00:00"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a job that trained one step on a cluster with one operator."""
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "kept")
    output, daemons = tmp_path / "output", tmp_path / "daemons"
    (output / "logs" / "attempt-0").mkdir(parents=True)
    (output / "logs" / "attempt-0" / "node-0.log").write_text("step 1\n")
    daemons.mkdir()
    (daemons / "scheduler.log").write_text("no node fits\n")
    return SimpleNamespace(
        name="quota-1a2b",
        output=output,
        recorder=SimpleNamespace(
            status_changes=[StatusChange(5.0, {"phase": "Running"})], steps=[RecordedStep(6.0, 0, 1)]
        ),
        cluster=SimpleNamespace(layout=SimpleNamespace(daemons=daemons)),
        list_operator_pods=lambda: [{"metadata": {"name": "operator-0"}}],
        installation=SimpleNamespace(kubectl=lambda *arguments: " ".join(arguments)),
    )


def test_error_message_of_failed_kubectl_command_is_saved(job: Any) -> None:
    def raise_error(*_arguments: str) -> str:
        raise RuntimeError("connection refused")

    job.installation.kubectl = job.list_operator_pods = raise_error

    folder = evidence.save_evidence(job, BEGAN)

    assert (folder / "events.json").read_text() == "connection refused\n"
    assert (folder / "steps.jsonl").exists()
    assert not list(folder.glob("operator-*"))
