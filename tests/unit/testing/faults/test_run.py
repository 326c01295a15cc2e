"""What the clock and the logs of a run come to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.expectation import Expectation, restarted
from testing.faults.job_recorder import Sighting, Step, Watch
from testing.faults.run import Times, is_well, measure, waited_for

STOPPING = {"attempts": [{"attempt": 0, "state": "Stopping"}]}
RUNNING = {"attempts": [{"attempt": 0, "state": "Running"}]}


def watched(*steps: Step, sightings: tuple[Sighting, ...] = (), struck: float | None = None) -> Any:
    """What is read of a Watch, without its thread."""
    return SimpleNamespace(steps=list(steps), sightings=list(sightings), struck=struck, finished=False)


def steps(attempt: int, numbers: range, *, start: float) -> list[Step]:
    return [Step(start + index / 10, attempt, number) for index, number in enumerate(numbers)]


def test_steps_that_are_trained_again_are_lost() -> None:
    watch = watched(*steps(0, range(1, 18), start=100), *steps(1, range(11, 30), start=110))
    sightings = (Sighting(101.0, RUNNING), Sighting(102.5, STOPPING))
    watch.sightings += sightings

    assert measure(watch, Times(struck=101.65)) == {
        "detected_seconds": 0.85,
        "again_seconds": 8.35,
        "steps_lost": 7,
        "steps_missing": 0,
    }


def test_a_step_that_nobody_trained_is_missing() -> None:
    watch = watched(*steps(0, range(1, 11), start=100), *steps(1, range(13, 20), start=110))

    assert measure(watch, Times(struck=101.0))["steps_missing"] == 2


def test_the_program_knows_best_when_it_went_wrong() -> None:
    watch = watched(*steps(0, range(1, 11), start=100), sightings=(Sighting(105.0, STOPPING),), struck=104.0)

    assert measure(watch, Times(struck=90.0))["detected_seconds"] == 1.0


def test_a_job_that_could_not_start_counts_from_the_end_of_the_obstacle() -> None:
    watch = watched(*steps(0, range(1, 11), start=112))

    assert measure(watch, Times(struck=100.0, over=108.0))["again_seconds"] == 4.0


def test_a_job_that_trains_on_is_not_training_again() -> None:
    measured = measure(watched(*steps(0, range(1, 50), start=100)), Times(struck=101.0, over=102.0))

    assert (measured["again_seconds"], measured["detected_seconds"], measured["steps_lost"]) == (None, None, 0)


def test_a_job_is_well_only_in_the_attempt_that_must_last() -> None:
    expected = Expectation("one", "", restarted(Reason.RANK_KILLED))
    before = steps(0, range(1, 30), start=100)

    assert not is_well(watched(*before), expected, Times(struck=101.0))
    assert not is_well(watched(*before, *steps(1, range(11, 15), start=110)), expected, Times(struck=101.0))
    assert is_well(watched(*before, *steps(1, range(11, 16), start=110)), expected, Times(struck=101.0))


def test_reasons_to_wait_are_told_once() -> None:
    reasons = ["Unschedulable", None, "Unschedulable", "ImagePullFailed"]
    sightings = [Sighting(0, {"waiting": {"reason": reason}} if reason else {}) for reason in reasons]

    assert waited_for(sightings) == ("Unschedulable", "ImagePullFailed")


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """One that never asks an API server."""
    watch = Watch.__new__(Watch)
    watch._logs, watch._read, watch.steps, watch.struck = tmp_path, {}, [], None
    return watch


def test_whole_lines_of_the_logs_are_read_once(watch: Watch, tmp_path: Path) -> None:
    log = tmp_path / "attempt-2" / "node-0.log"
    log.parent.mkdir()
    log.write_text("supervisor: x\nstep 1\nstep 2/90  loss 1.0\nstep 2/90  eval_loss 1.0\nste")
    (log.parent / "node-1.log").write_text("step 7\nfault strikes at 12.5\n")

    watch._look_at_logs()
    with log.open("a") as file:
        file.write("p 3\n")
    watch._look_at_logs()

    assert [(step.attempt, step.step) for step in watch.steps] == [(2, 1), (2, 2), (2, 3)]
    assert watch.struck == 12.5
