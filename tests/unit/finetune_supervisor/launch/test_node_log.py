"""Tests of the log file of a node: its limit, and volumes that are full, lost or blocked."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from finetune_supervisor import background_tasks
from finetune_supervisor.launch import node_log
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.launch.node_log import NodeLog


def test_a_long_log_keeps_its_start_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "FILE_BYTES", 1000)
    monkeypatch.setattr(background_tasks, "_MAX_PENDING", 5001)
    folder = tmp_path / "logs"
    log = NodeLog(folder / "node-0.log")
    lines = [f"line {number:05d}\n".encode() for number in range(5000)]

    for line in lines:
        log.write(line)
    log.tasks.finish(10.0)

    head, previous, tail = (
        (folder / f"node-0{name}").read_bytes() for name in (".log", ".tail.previous.log", ".tail.log")
    )
    mark = b"supervisor: this log continues in node-0.tail.log\n"
    assert head.startswith(b"".join(lines[:80]))
    assert head.endswith(mark)
    assert b"".join(lines).endswith(previous.removesuffix(mark) + tail)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3300
    assert log.tasks.problem == ""


def test_the_program_does_not_wait_for_a_blocked_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tasks, "_MAX_PENDING", 10)
    os.mkfifo(tmp_path / "node-0.log")  # opening it blocks until somebody reads it
    log = NodeLog(tmp_path / "node-0.log")
    started_at = time.monotonic()

    for _ in range(100):
        log.write(b"x" * 100)
    log.tasks.finish(0.1)

    assert time.monotonic() - started_at < 5
    assert "slower than the training" in log.tasks.problem
    os.close(os.open(tmp_path / "node-0.log", os.O_RDONLY | os.O_NONBLOCK))  # let the thread end


def test_the_problem_of_a_log_is_a_state_and_one_line(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_log, "open_below", lambda *_: os.open("/dev/full", os.O_WRONLY))
    output = ProcessOutput(tmp_path / "node-0.log")

    output.write(b"line\n")
    output.finish(lambda: None, seconds=10.0)
    for _ in range(10):
        output.write(b"line\n")

    assert "No space left on device" in output.log_problem
    assert capsysbinary.readouterr().out.count(b"this log is incomplete in the output") == 1


def test_a_log_goes_on_when_its_volume_has_space_again(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder would be")
    output = ProcessOutput(tmp_path / "logs" / "node-0.log")
    output.write(b"lost\n")
    while not output._file.tasks.problem:  # type: ignore[union-attr]
        time.sleep(0.01)

    (tmp_path / "logs").unlink()
    output.write(b"kept\n")
    output.finish((tmp_path / "node-0.json").touch, seconds=10.0)

    assert b"kept\n" in (tmp_path / "logs" / "node-0.log").read_bytes()
    assert (tmp_path / "node-0.json").exists()
