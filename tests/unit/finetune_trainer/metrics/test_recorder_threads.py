"""Tests that a tracker can neither end nor delay the training; test_error_identity.py has the errors."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_supervisor import background_tasks
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.metrics import recorder_threads
from finetune_trainer.metrics.recorder_threads import RecorderThreads


class Tracker:
    """Tracker that waits in its first event, and records the steps of all events."""

    def __init__(self) -> None:
        self.may_continue = threading.Event()
        self.events: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def handle(_args: Any, state: Any, _control: Any, **_: Any) -> None:
            self.may_continue.wait(60)
            self.events.append((name, state.global_step))

        return handle


@pytest.fixture
def heartbeat(tmp_path: Path) -> HeartbeatWriter:
    return HeartbeatWriter(tmp_path, rank=0, local_rank=0)


def run_training(recorder: Any, *, steps: int) -> None:
    state = SimpleNamespace(global_step=0)
    recorder.on_train_begin(None, state, None)
    for step in range(1, steps + 1):
        state.global_step = step
        recorder.on_log(None, state, None, logs={})
        recorder.on_step_end(None, state, None)
    recorder.on_train_end(None, state, None)


def test_all_events_are_passed_with_the_state_at_their_time(heartbeat: HeartbeatWriter) -> None:
    tracker: Any = Tracker()
    tracker.may_continue.set()

    run_training(RecorderThreads({"wandb": tracker}, heartbeat), steps=2)

    assert tracker.events == [
        ("on_train_begin", 0),
        *(("on_log", 1), ("on_step_end", 1), ("on_log", 2), ("on_step_end", 2)),
        ("on_train_end", 2),
    ]
    assert heartbeat.degraded == ()


def test_a_tracker_that_exits_is_reported(heartbeat: HeartbeatWriter) -> None:
    tracker: Any = SimpleNamespace(**dict.fromkeys(("on_train_begin", "on_log", "on_step_end", "on_train_end"), exit_))

    run_training(RecorderThreads({"wandb": tracker}, heartbeat), steps=1)

    (degradation,) = heartbeat.degraded
    assert "wandb: no login" in degradation.message


def exit_(*_: object, **__: object) -> None:
    sys.exit("no login")


@pytest.mark.parametrize("steps", [1, 50])
def test_training_does_not_wait_for_a_tracker_that_does_not_respond(
    heartbeat: HeartbeatWriter, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(background_tasks, "_MAX_PENDING", 10)
    monkeypatch.setattr(recorder_threads, "FINISH_SECONDS", 0.1)
    tracker: Any = Tracker()
    started_at = time.monotonic()

    run_training(RecorderThreads({"wandb": tracker}, heartbeat), steps=steps)

    assert time.monotonic() - started_at < 5
    (degradation,) = heartbeat.degraded
    assert degradation.reason == "NotRecorded"
    assert "wandb: it " in degradation.message
    tracker.may_continue.set()
