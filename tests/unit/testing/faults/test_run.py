"""Tests of the measurements derived from a run's status changes and logged steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import Expectation, expect_restart
from testing.faults.job_recorder import JobRecorder, RecordedStep, StatusChange
from testing.faults.run import FaultTimes, has_recovered, list_pending_reasons, measure_recovery

STOPPING = {"attempts": [{"attempt": 0, "state": "Stopping"}]}
RUNNING = {"attempts": [{"attempt": 0, "state": "Running"}]}


def create_fake_recorder(
    *steps: RecordedStep, status_changes: tuple[StatusChange, ...] = (), injected_at: float | None = None
) -> Any:
    """Return a fake JobRecorder without a thread."""
    return SimpleNamespace(
        steps=list(steps), status_changes=list(status_changes), injected_at=injected_at, is_finished=False
    )


def make_steps(attempt: int, numbers: range, *, start_seconds: float) -> list[RecordedStep]:
    return [RecordedStep(start_seconds + index / 10, attempt, number) for index, number in enumerate(numbers)]


def test_steps_trained_twice_count_as_lost() -> None:
    recorder = create_fake_recorder(
        *make_steps(0, range(1, 18), start_seconds=100), *make_steps(1, range(11, 30), start_seconds=110)
    )
    status_changes = (StatusChange(101.0, RUNNING), StatusChange(102.5, STOPPING))
    recorder.status_changes += status_changes

    assert measure_recovery(recorder, FaultTimes(injected_at=101.65)) == {
        "detected_seconds": 0.85,
        "again_seconds": 8.35,
        "steps_lost": 7,
        "steps_missing": 0,
    }


def test_steps_never_trained_count_as_missing() -> None:
    recorder = create_fake_recorder(
        *make_steps(0, range(1, 11), start_seconds=100), *make_steps(1, range(13, 20), start_seconds=110)
    )

    assert measure_recovery(recorder, FaultTimes(injected_at=101.0))["steps_missing"] == 2


def test_injection_time_logged_by_the_program_takes_precedence() -> None:
    recorder = create_fake_recorder(
        *make_steps(0, range(1, 11), start_seconds=100),
        status_changes=(StatusChange(105.0, STOPPING),),
        injected_at=104.0,
    )

    assert measure_recovery(recorder, FaultTimes(injected_at=90.0))["detected_seconds"] == 1.0


def test_recovery_time_of_unstarted_job_counts_from_removal_of_the_fault() -> None:
    recorder = create_fake_recorder(*make_steps(0, range(1, 11), start_seconds=112))

    assert measure_recovery(recorder, FaultTimes(injected_at=100.0, removed_at=108.0))["again_seconds"] == 4.0


def test_uninterrupted_job_has_no_recovery_time() -> None:
    measurement = measure_recovery(
        create_fake_recorder(*make_steps(0, range(1, 50), start_seconds=100)),
        FaultTimes(injected_at=101.0, removed_at=102.0),
    )

    assert (measurement["again_seconds"], measurement["detected_seconds"], measurement["steps_lost"]) == (None, None, 0)


def test_job_has_recovered_only_in_last_expected_attempt() -> None:
    expectation = Expectation("one", "", expect_restart(Reason.RANK_KILLED))
    earlier_steps = make_steps(0, range(1, 30), start_seconds=100)

    assert not has_recovered(create_fake_recorder(*earlier_steps), expectation, FaultTimes(injected_at=101.0))
    assert not has_recovered(
        create_fake_recorder(*earlier_steps, *make_steps(1, range(11, 15), start_seconds=110)),
        expectation,
        FaultTimes(injected_at=101.0),
    )
    assert has_recovered(
        create_fake_recorder(*earlier_steps, *make_steps(1, range(11, 16), start_seconds=110)),
        expectation,
        FaultTimes(injected_at=101.0),
    )


def test_each_pending_reason_is_listed_once() -> None:
    reasons = ["Unschedulable", None, "Unschedulable", "ImagePullFailed"]
    status_changes = [StatusChange(0, {"waiting": {"reason": reason}} if reason else {}) for reason in reasons]

    assert list_pending_reasons(status_changes) == ("Unschedulable", "ImagePullFailed")


@pytest.fixture
def recorder(tmp_path: Path) -> JobRecorder:
    """Return a JobRecorder that does not connect to an API server."""
    recorder = JobRecorder.__new__(JobRecorder)
    recorder._logs, recorder._read_bytes, recorder.steps, recorder.injected_at = tmp_path, {}, [], None
    return recorder


def test_each_complete_log_line_is_read_once(recorder: JobRecorder, tmp_path: Path) -> None:
    log = tmp_path / "attempt-2" / "node-0.log"
    log.parent.mkdir()
    log.write_text("supervisor: x\nstep 1\nstep 2/90  loss 1.0\nstep 2/90  eval_loss 1.0\nste")
    (log.parent / "node-1.log").write_text("step 7\nfault injected at 12.5\n")

    recorder._read_logs()
    with log.open("a") as file:
        file.write("p 3\n")
    recorder._read_logs()

    assert [(step.attempt, step.step) for step in recorder.steps] == [(2, 1), (2, 2), (2, 3)]
    assert recorder.injected_at == 12.5
