"""Programs known by pid files."""

import os
import signal
import sys
import time
from pathlib import Path

from testing.cluster.host.processes import Daemon, daemons_in, start_time, stop_together


def sleeper(folder: Path, *, stubborn: bool = False) -> Daemon:
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
    code = f"{ignoring}print('ready', flush=True); import time; time.sleep(60)"
    return Daemon(name="sleeper", argv=(sys.executable, "-c", code), folder=folder)


def started(daemon: Daemon) -> int:
    """Its pid, once its first line is written: only then does it treat signals as it will."""
    daemon.start()
    deadline = time.monotonic() + 10
    while "ready" not in daemon.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = daemon.pid()
    assert pid is not None
    return pid


def test_a_second_start_keeps_the_running_program(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path)
    pid = started(daemon)

    daemon.start()

    assert daemon.pid() == pid
    daemon.stop()
    assert daemon.pid() is None
    assert start_time(pid) is None


def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path, stubborn=True)
    pid = started(daemon)

    daemon.stop(patience_seconds=0.2)

    assert start_time(pid) is None


def test_a_pid_that_another_program_has_now_is_left_alone(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path)
    daemon.pid_file.write_text(f"{os.getpid()} 1\n")

    assert daemon.pid() is None
    daemon.stop()

    assert start_time(os.getpid()) is not None


def test_a_killed_program_counts_as_ended_before_anybody_waits_for_it(tmp_path: Path) -> None:
    daemon = sleeper(tmp_path)
    pid = started(daemon)

    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while daemon.pid() is not None and time.monotonic() < deadline:
        time.sleep(0.01)

    assert daemon.pid() is None


def test_everything_with_a_pid_file_can_be_stopped_by_its_folder(tmp_path: Path) -> None:
    pid = started(sleeper(tmp_path))

    stop_together(daemons_in(tmp_path), patience_seconds=1)

    assert start_time(pid) is None
    assert not list(tmp_path.glob("*.pid"))
