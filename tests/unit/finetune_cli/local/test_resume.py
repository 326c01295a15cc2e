"""Tests of resuming a local run."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, RestartCounts
from finetune_cli.local.resume import prepare_resume
from testing.builders.jobs import NOW

LATER = NOW + timedelta(hours=1)


def build_status(state: AttemptState, **fields: Any) -> JobStatus:
    record = AttemptRecord(attempt=1, state=state, start_time=NOW)
    return JobStatus(attempt=1, attempts=(record,), start_time=NOW, **fields)


def test_complete_job_stays_complete(tmp_path: Path) -> None:
    complete_status = build_status(AttemptState.SUCCEEDED, completion_time=NOW)

    assert prepare_resume(complete_status, now=LATER) == complete_status


@pytest.mark.parametrize("state", [AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING])
def test_unfinished_attempt_becomes_stopped(state: AttemptState) -> None:
    resumed_status = prepare_resume(build_status(state), now=LATER)

    assert resumed_status.attempts[-1].state is AttemptState.STOPPED
    assert resumed_status.start_time == NOW


def test_failed_job_resumes_with_a_new_attempt_and_a_new_restart_budget() -> None:
    counts = RestartCounts(counted=3)
    resumed_status = prepare_resume(
        build_status(AttemptState.FAILED, completion_time=NOW, without_progress=counts), now=LATER
    )

    assert resumed_status.attempts[-1].state is AttemptState.STOPPED
    assert (resumed_status.completion_time, resumed_status.start_time) == (None, LATER)
    assert resumed_status.without_progress == RestartCounts()
