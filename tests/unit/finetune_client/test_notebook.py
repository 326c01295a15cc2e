"""Tests of the representation of jobs in notebooks."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from finetune_api.v1alpha1.status import Condition, Display, JobStatus, Phase, Progress, WaitStatus
from finetune_client.job import Job
from finetune_client.job_html import render_job_html
from finetune_client.notebook import MAX_POINTS, add_loss, show_jobs
from finetune_supervisor.messages import Degradation
from testing.builders.jobs import NOW, job

HOSTILE = "<script>alert('x')</script>"


def build_job(step: int, loss: float | None = None, **status: Any) -> Job:
    progress = Progress(step=step, total_steps=10, loss=loss)
    return Job({}, job().metadata, JobStatus(phase=Phase.RUNNING, progress=progress, **status))


def test_html_is_well_formed_and_contains_no_markup_of_the_status() -> None:
    status = JobStatus(
        phase=Phase.FAILED,
        conditions=(
            Condition(type="Failed", status="True", last_transition_time=NOW, reason=HOSTILE, message=HOSTILE),
        ),
        waiting=WaitStatus(reason=HOSTILE, message=HOSTILE, since=NOW),
        degraded=(Degradation(HOSTILE, HOSTILE),),
        display=Display(nodes=HOSTILE, progress=HOSTILE),
        progress=Progress(step=20, total_steps=10),
        restarts=1,
    )

    html = render_job_html(job().metadata, status, [(1, 2.0), (2, 1.0)])

    root = ElementTree.fromstring(html)  # noqa: S314  our own text
    assert not root.findall(".//script")
    assert "".join(root.itertext()).count("alert") == 8


def test_the_curve_spans_the_steps_and_losses() -> None:
    html = build_job(1)._repr_html_()
    curve = render_job_html(job().metadata, JobStatus(), [(10, 3.0), (20, 1.0), (30, 2.0)])

    assert "<svg" not in html
    assert 'points="0.0,0.0 180.0,90.0 360.0,45.0"' in curve
    assert "loss 3 to 1, steps 10 to 30" in curve


def test_repeated_steps_after_a_restart_replace_the_earlier_ones() -> None:
    losses: list[tuple[int, float]] = []
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5), (3, float("nan"))):
        add_loss(losses, build_job(step, loss))

    assert losses == [(1, 3.0), (2, 2.5)]


def test_a_long_curve_keeps_its_ends_and_a_bounded_number_of_points() -> None:
    losses: list[tuple[int, float]] = []
    for step in range(5000):
        add_loss(losses, build_job(step, 1.0))

    assert len(losses) <= MAX_POINTS
    assert losses[-1][0] == 4999
    assert losses[0][0] < 100


def test_all_states_are_shown_in_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    module = ModuleType("IPython.display")
    module.HTML = str  # type: ignore[attr-defined]

    def display(html: str, *, display_id: bool) -> SimpleNamespace:
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)

    last = show_jobs([build_job(1, 3.0), build_job(2, 2.0)])

    assert last.status.progress is not None
    assert last.status.progress.step == 2
    assert ["<svg" in html for html in shown] == [False, True]
