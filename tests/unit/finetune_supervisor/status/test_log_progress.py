"""Tests of the progress in the output of a user command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import parse_termination
from finetune_operator.observation.read_evidence import read_evidence
from finetune_supervisor import contract
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.liveness.heartbeat import Heartbeat, write_heartbeat
from finetune_supervisor.messages import TrainingProgress
from finetune_supervisor.status.log_progress import LogProgress
from finetune_supervisor.status.node_reporter import NodeReporter
from testing.builders.nodes import node
from testing.corpus.progress_corpus import ProgramOutput, read_program_outputs
from testing.processes.supervisor_environment import build_supervisor_environment

OUTPUTS = read_program_outputs()
BAR = "\r 12%|█▏        | 12/100 [00:10<01:20,  1.1it/s]".encode()


class Log:
    """Output of a node, and the progress in it after each pass of one second."""

    def __init__(self, folder: Path) -> None:
        self.output = ProcessOutput(None)
        self.progress = LogProgress(node(folder))
        self._now = 0.0

    def write(self, chunk: bytes) -> TrainingProgress | None:
        """Write a chunk, let one second pass and return the progress."""
        self.output.write(chunk)
        self._now += 1.0
        self.progress.update(self.output, now=self._now)
        return self.last

    @property
    def last(self) -> TrainingProgress | None:
        return self.progress.heartbeats[0].progress if self.progress.heartbeats else None


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


@pytest.mark.parametrize("chunk_bytes", [17, 4096])
@pytest.mark.parametrize("program", OUTPUTS, ids=lambda program: program.name)
def test_progress_of_a_program_is_read_from_its_output(log: Log, program: ProgramOutput, chunk_bytes: int) -> None:
    steps = []
    for start in range(0, len(program.output), chunk_bytes):
        progress = log.write(program.output[start : start + chunk_bytes])
        steps.append(progress.step if progress else 0)
    log.progress.finish(log.output)

    assert log.last is not None
    names = ("step", "total_steps", "epoch", "loss", "learning_rate", "eta_seconds")
    assert {name: getattr(log.last, name) for name in names} == {
        name: getattr(program.expected, name) for name in names
    }
    assert steps == sorted(steps)
    assert len(OUTPUTS) == 9


def test_bar_without_a_separator_is_read_after_a_second_without_output(log: Log) -> None:
    assert log.write(BAR[:-4]) is None
    assert log.write(BAR[-4:]) is None

    progress = log.write(b"")

    assert progress is not None
    assert progress.step == 12


def test_output_is_read_once_per_second(log: Log) -> None:
    log.write(b"")
    log.output.write(BAR + b"\n")
    log.progress.update(log.output, now=1.5)

    assert log.last is None


def test_lines_before_the_kept_output_are_lost(log: Log) -> None:
    log.write(BAR)
    tail = b"100%|##| 99/100 [00:10<00:01,  1.1it/s]\r"
    progress = log.write(b"x" * 100_000 + BAR + b"y" * (65_536 - len(tail)) + tail)

    assert progress is None, "the kept output begins within a line"
    assert log.write(BAR + b"\n") is not None


def test_line_above_4096_bytes_is_ignored(log: Log) -> None:
    for _ in range(5):
        log.write(b"x" * 1024)

    assert log.write(BAR[1:] + b"\n") is None
    assert log.write(BAR + b"\n") is not None


def test_first_step_time_is_set_once_the_step_increases(log: Log) -> None:
    log.write(b"\r  0%|  | 50/100 [00:00<?, ?it/s]\r")
    assert log.progress.heartbeats[0].first_step_time is None

    log.write(b"\r 51%|  | 51/100 [00:00<?, ?it/s]\r")
    assert log.progress.heartbeats[0].first_step_time is not None


def test_posted_progress_takes_precedence_over_lines(log: Log, tmp_path: Path) -> None:
    this_node = node(tmp_path)
    this_node.run_folder.heartbeats.mkdir()
    reporter = NodeReporter(this_node, log.output, log_progress=log.progress)
    log.write(BAR + b"\n")
    progress = reporter.build_running_message().progress
    assert progress is not None
    assert (progress.step, progress.from_log, progress.update_time is None) == (12, True, False)

    posted = Heartbeat(0, 0, pid=None, time=100.0, phase=contract.TRAIN, progress=TrainingProgress(step=7))
    write_heartbeat(this_node.run_folder.heartbeats, posted)

    progress = reporter.build_running_message().progress
    assert progress is not None
    assert (progress.step, progress.from_log) == (7, None)


def run_supervisor(folder: Path, command: dict[str, Any], **variables: str) -> str:
    """Run a command under a supervisor and return its termination message."""
    config = folder / "job.json"
    config.write_text(json.dumps({"command": command}))
    environment = {
        **build_supervisor_environment(folder),
        contract.CONFIG: str(config),
        "MASTER_ADDR": "localhost",
        "NODE_RANK": "0",
    }
    subprocess.run(
        [sys.executable, "-m", "finetune_supervisor"],
        env={**environment, **variables},
        timeout=60,
        check=False,
        capture_output=True,
    )
    return (folder / "termination-log").read_text()


PRINTS_BAR = {"exec": [sys.executable, "-c", f"import sys; sys.stderr.buffer.write({BAR!r}); sys.exit(3)"]}


def test_supervisor_reports_the_progress_of_a_command_that_posts_none(tmp_path: Path) -> None:
    termination = parse_termination(run_supervisor(tmp_path, PRINTS_BAR))

    assert termination is not None
    assert termination.progress is not None
    assert (termination.progress.step, termination.progress.total_steps) == (12, 100)
    assert termination.progress.from_log
    pod = {"metadata": {"name": "bert-0-0"}}
    evidence = read_evidence(pod, {"exitCode": 1}, termination, node_rank=0, is_tombstone=False)
    assert evidence.last_step is None, "lines of a program must not renew a restart budget"


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        pytest.param({**PRINTS_BAR, "progressFrom": "posts"}, {}, id="switched off"),
        pytest.param(PRINTS_BAR, {"NODE_RANK": "1"}, id="another node"),
    ],
)
def test_lines_of_a_command_are_not_read(tmp_path: Path, command: dict[str, Any], variables: dict[str, str]) -> None:
    termination = parse_termination(run_supervisor(tmp_path, command, **variables))

    assert termination is not None
    assert termination.progress is None
