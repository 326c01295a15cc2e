"""Tests of the termination messages of running and finished nodes."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_supervisor import contract
from finetune_supervisor.judge import build_failure_message, build_stop_message
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.liveness.heartbeat import Heartbeat, write_heartbeat
from finetune_supervisor.messages import TerminationMessage, TrainingProgress
from finetune_supervisor.status.node_reporter import NodeReporter
from testing.builders.nodes import node

HEARTBEAT = Heartbeat(
    rank=0,
    local_rank=0,
    pid=7,
    time=100.0,
    phase=contract.TRAIN,
    first_step=4,
    peak_memory_bytes=5,
    progress=TrainingProgress(step=9),
)
NO_SPACE = "[Errno 28] No space left on device"


@pytest.fixture
def reporter(tmp_path: Path) -> NodeReporter:
    (tmp_path / "ranks").mkdir()
    return NodeReporter(node(tmp_path), ProcessOutput(None))


def read_message(folder: Path) -> dict[str, Any]:
    message: dict[str, Any] = json.loads((folder / "termination-log").read_text())
    return message


def test_running_message_has_progress_of_rank_zero_and_highest_peak_memory(
    reporter: NodeReporter, tmp_path: Path
) -> None:
    write_heartbeat(tmp_path / "ranks", HEARTBEAT)
    write_heartbeat(
        tmp_path / "ranks", replace(HEARTBEAT, rank=1, local_rank=1, phase=contract.SAVE, peak_memory_bytes=8)
    )
    reporter.outcome = contract.RUNNING

    reporter.write_running_message()

    message = read_message(tmp_path)
    assert (message["final"], message["outcome"], message["phase"]) == (False, "running", "train")
    assert (message["firstStep"], message["peakMemoryBytes"], message["progress"]["step"]) == (4, 8, 9)


def test_message_before_the_first_heartbeat_has_no_progress(reporter: NodeReporter) -> None:
    assert reporter.build_running_message() == TerminationMessage(attempt=1)


@pytest.mark.parametrize(
    ("final_message", "is_volume_named"),
    [
        pytest.param(build_failure_message(TerminationMessage(), "OSError", NO_SPACE, now=1.0), True, id="failed"),
        pytest.param(build_stop_message(TerminationMessage(), NO_SPACE, now=1.0), False, id="stopped"),
    ],
)
def test_only_the_message_of_a_failed_node_names_full_volumes(
    reporter: NodeReporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    final_message: TerminationMessage,
    is_volume_named: bool,
) -> None:
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)

    reporter.write_final_message(final_message)

    assert (f", {tmp_path})" in read_message(tmp_path)["message"]) is is_volume_named
    assert reporter.outcome == final_message.outcome


def test_unwritable_termination_log_is_reported_in_the_node_log(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    reporter = NodeReporter(node(tmp_path, termination_log=tmp_path / "missing" / "log"), ProcessOutput(None))

    reporter.write_running_message()

    assert b"the termination message cannot be written" in capfdbinary.readouterr().out


def test_final_message_is_copied_beside_the_log_for_the_report_of_a_later_attempt(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    failed_node = node(tmp_path)
    reporter = NodeReporter(failed_node, ProcessOutput(failed_node.log))

    reporter.write_running_message()
    assert not (tmp_path / "logs/attempt-1/node-0.json").exists()
    reporter.write_final_message(build_failure_message(TerminationMessage(), "OSError", "broken", now=1.0))

    assert (tmp_path / "logs/attempt-1/node-0.json").read_bytes() == (tmp_path / "termination-log").read_bytes()


def test_an_output_that_cannot_be_written_does_not_change_the_termination_message(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "logs").write_text("a file where the folder would be")
    reporter = NodeReporter(node(tmp_path), ProcessOutput(None))

    reporter.write_final_message(build_failure_message(TerminationMessage(), "OSError", "broken", now=1.0))

    assert read_message(tmp_path)["message"] == "broken"
