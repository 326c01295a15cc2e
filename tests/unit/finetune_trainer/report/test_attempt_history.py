"""Tests of the log of attempts, of what ended them, and of the division of their time."""

import json
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.termination import Termination
from finetune_supervisor.failures.termination_message import write_termination
from finetune_supervisor.messages import TerminationMessage, TrainingProgress
from finetune_trainer.report.attempt_history import RankTime, build_history, explain_ending
from finetune_trainer.report.attempt_log import AttemptEntry, AttemptLog, LoggedAttempt, read_attempts

ENTRY = AttemptEntry(uid="ours", attempt=0, ranks=2, started_at=1000.0)
OOM = TerminationMessage(
    node_rank=1,
    attempt=0,
    final=True,
    outcome="failed",
    rank=3,
    error_type="OutOfMemoryError",
    message="m",
    time=1500.0,
)


def entry(attempt: int, **fields: Any) -> AttemptEntry:
    return replace(ENTRY, attempt=attempt, **fields)


def attempt(number: int, **fields: Any) -> LoggedAttempt:
    return LoggedAttempt(entry(number, **fields), last_output_at=0.0, failures=())


def write_attempt(logs: Path, logged: AttemptEntry, *messages: TerminationMessage) -> Path:
    folder = logs / f"attempt-{logged.attempt}"
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text(json.dumps(asdict(logged)))
    for message in messages:
        write_termination(folder / f"node-{message.node_rank}.json", message)
    return folder


def test_an_attempt_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, ENTRY)
    log.start_training(first_step=4, settings={"batch": "1 x 1 x 1 = 1"})
    log.record_step(5)
    log.write()

    (read,) = read_attempts(tmp_path, uid="ours")

    assert (read.entry.first_step, read.entry.step, read.entry.settings) == (4, 5, {"batch": "1 x 1 x 1 = 1"})
    assert read.entry.training_at is not None
    assert read.entry.updated_at >= read.entry.training_at


def test_attempts_are_in_numerical_order_and_those_of_other_jobs_are_left_out(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        write_attempt(tmp_path, entry(number))
    write_attempt(tmp_path, entry(3, uid="theirs"))

    assert [read.entry.attempt for read in read_attempts(tmp_path, uid="ours")] == [0, 2, 10]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("[" * 10_000, id="deeply nested"),
        pytest.param('{"uid": "ours"}', id="without fields"),
        pytest.param(json.dumps(asdict(ENTRY) | {"ranks": "2"}), id="wrong type"),
        pytest.param(json.dumps(asdict(ENTRY) | {"attempt": 7}), id="another attempt"),
        pytest.param(json.dumps(asdict(ENTRY) | {"ranks": 0}), id="no ranks"),
        pytest.param(json.dumps(asdict(ENTRY) | {"settings": {"batch": "x" * 20_000}}), id="too large"),
    ],
)
def test_an_invalid_entry_is_left_out(tmp_path: Path, content: str) -> None:
    write_attempt(tmp_path, ENTRY)
    (tmp_path / "attempt-0" / "attempt.json").write_text(content)

    assert read_attempts(tmp_path, uid="ours") == ()


def test_a_pipe_or_a_link_in_place_of_an_entry_is_left_out(tmp_path: Path) -> None:
    folder = write_attempt(tmp_path, ENTRY)
    secret = (folder / "attempt.json").rename(tmp_path / "elsewhere.json")
    (folder / "attempt.json").symlink_to(secret)
    os.mkfifo(folder / "node-0.json")

    assert read_attempts(tmp_path, uid="ours") == ()


def test_messages_of_an_earlier_job_in_the_folder_are_left_out(tmp_path: Path) -> None:
    write_attempt(tmp_path, ENTRY, OOM, replace(OOM, node_rank=2, time=999.0))

    (read,) = read_attempts(tmp_path, uid="ours")

    assert [message.node_rank for message in read.failures] == [1]


def test_progress_of_the_final_message_of_node_0_that_is_newer_than_the_record_is_used(tmp_path: Path) -> None:
    first, last = (datetime.fromtimestamp(seconds, UTC) for seconds in (1010.0, 1090.0))
    progress = TrainingProgress(step=7, first_step_time=first, update_time=last)
    write_attempt(tmp_path, ENTRY, replace(OOM, progress=progress), replace(OOM, node_rank=0, progress=progress))

    (read,) = read_attempts(tmp_path, uid="ours")

    assert (read.entry.training_at, read.entry.step, read.entry.updated_at) == (1010.0, 7, 1090.0)


def test_a_record_is_written_at_the_first_step(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, ENTRY)
    log.record_step(1)
    log.record_step(2)

    (read,) = read_attempts(tmp_path, uid="ours")

    assert read.entry.step == 1
    assert read.entry.training_at is not None


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        pytest.param((), "no final message", id="pods were killed"),
        pytest.param((Termination(**asdict(OOM)),), "node 1, rank 3: OutOfMemoryError", id="one node"),
        pytest.param(
            (Termination(**asdict(replace(OOM, node_rank=0, victim=True, time=1.0))), Termination(**asdict(OOM))),
            "node 1, rank 3: OutOfMemoryError",
            id="a victim failed earlier",
        ),
        pytest.param((Termination(**asdict(replace(OOM, outcome="stopped"))),), "stopped on request", id="suspended"),
    ],
)
def test_the_cause_is_that_of_the_first_node_that_is_no_victim(failures: tuple[Termination, ...], cause: str) -> None:
    assert cause in explain_ending(failures).cause


def test_steps_that_a_later_attempt_repeats_are_lost() -> None:
    """The first attempt trains 10 steps in 100 s, of which the second one repeats 4."""
    logged = (
        attempt(0, training_at=1050.0, step=10, updated_at=1150.0),
        attempt(1, started_at=1200.0, first_step=6, training_at=1230.0, step=20, updated_at=1400.0),
    )

    history = build_history(logged, now=1410.0)

    assert history is not None
    assert history.attempts[0].time == RankTime(useful=2 * 60.0, starting=2 * 50.0, lost=2 * 40.0)
    assert history.attempts[1].time == RankTime(useful=2 * 180.0, starting=2 * 30.0)
    assert (history.started_at, history.finished_at, history.restarts) == (1000.0, 1410.0, 1)


def test_time_between_the_last_step_and_the_end_of_a_failed_attempt_is_lost() -> None:
    first = replace(attempt(0, training_at=1000.0, step=10, updated_at=1100.0), last_output_at=1400.0)

    history = build_history((first, attempt(1, started_at=2000.0, first_step=10)), now=2010.0)

    assert history is not None
    assert history.attempts[0].time == RankTime(useful=2 * 100.0, lost=2 * 300.0)
    assert history.attempts[0].duration_seconds == 400.0


def test_an_attempt_without_a_completed_step_was_only_starting() -> None:
    history = build_history((attempt(0, updated_at=1100.0), attempt(2, started_at=1500.0)), now=1600.0)

    assert history is not None
    assert [each.time for each in history.attempts] == [RankTime(starting=200.0), RankTime(starting=200.0)]
    assert history.restarts == 2


def test_settings_that_an_attempt_changed_are_listed() -> None:
    before, after = {"batch": "4 x 1 x 2 = 8", "parallelism": "ddp"}, {"batch": "2 x 2 x 2 = 8", "parallelism": "ddp"}

    history = build_history((attempt(0, settings=before), attempt(1, settings=after)), now=2000.0)

    assert history is not None
    assert [each.changed_settings for each in history.attempts] == [{}, {"batch": "4 x 1 x 2 = 8 → 2 x 2 x 2 = 8"}]


TIMES = st.floats(0, 4e9)
STEPS = st.integers(0, 2**53)


@given(
    st.lists(
        st.builds(
            LoggedAttempt,
            st.builds(
                AttemptEntry,
                uid=st.just("ours"),
                attempt=STEPS,
                ranks=st.integers(1, 1000),
                started_at=TIMES,
                settings=st.just({}),
                training_at=st.none() | TIMES,
                first_step=STEPS,
                step=STEPS,
                updated_at=TIMES,
            ),
            TIMES,
            st.just(()),
        ),
        max_size=5,
    ),
    TIMES,
)
def test_the_parts_of_the_time_of_any_record_are_not_negative(logged: list[LoggedAttempt], now: float) -> None:
    history = build_history(logged, now=now)

    assert (history is None) == (not logged)
    for each in history.attempts if history else ():
        assert min(each.time.useful, each.time.starting, each.time.lost) >= 0
