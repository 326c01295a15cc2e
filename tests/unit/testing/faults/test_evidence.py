"""What is kept of a run that went wrong, whatever still answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testing.faults import evidence
from testing.faults.job_recorder import Sighting, Step

BEGAN = "2026-11-22T20:47:24+00:00"


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job that trained one step, on a cluster with one operator."""
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "kept")
    output, daemons = tmp_path / "output", tmp_path / "daemons"
    (output / "logs" / "attempt-0").mkdir(parents=True)
    (output / "logs" / "attempt-0" / "node-0.log").write_text("step 1\n")
    daemons.mkdir()
    (daemons / "scheduler.log").write_text("no room\n")
    return SimpleNamespace(
        job="quota-1a2b",
        output=output,
        watch=SimpleNamespace(sightings=[Sighting(5.0, {"phase": "Running"})], steps=[Step(6.0, 0, 1)]),
        cluster=SimpleNamespace(layout=SimpleNamespace(daemons=daemons)),
        operators=lambda: [{"metadata": {"name": "operator-0"}}],
        stack=SimpleNamespace(kubectl=lambda *words: " ".join(words)),
    )


def test_all_that_the_figures_leave_out_is_kept(scene: Any) -> None:
    folder = evidence.keep_evidence(scene, BEGAN)

    assert folder.name == "quota-1a2b-2026-11-22T204724"
    assert json.loads((folder / "statuses.jsonl").read_text()) == {"time": 5.0, "phase": "Running"}
    assert json.loads((folder / "steps.jsonl").read_text()) == {"time": 6.0, "attempt": 0, "step": 1}
    assert (folder / "logs" / "attempt-0" / "node-0.log").read_text() == "step 1\n"
    assert (folder / "scheduler.log").read_text() == "no room\n"
    assert (folder / "events.json").read_text() == "get events -A -o json"
    assert (folder / "operator-0.log").read_text().startswith("logs -n")


def test_what_does_not_answer_leaves_its_reason(scene: Any) -> None:
    def refuse(*_words: str) -> str:
        raise RuntimeError("connection refused")

    scene.stack.kubectl = scene.operators = refuse

    folder = evidence.keep_evidence(scene, BEGAN)

    assert (folder / "events.json").read_text() == "connection refused\n"
    assert (folder / "steps.jsonl").exists()
    assert not list(folder.glob("operator-*"))
