"""Tests of daemons tracked by pid files."""

import os
import sys
import time
from pathlib import Path

from testing.cluster.host.processes import Daemon, read_start_time


def create_sleeping_daemon(folder: Path, *, ignore_sigterm: bool = False) -> Daemon:
    signal_setup = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if ignore_sigterm else ""
    code = f"{signal_setup}print('ready', flush=True); import time; time.sleep(60)"
    return Daemon(name="sleeper", argv=(sys.executable, "-c", code), folder=folder)


def start_and_wait(daemon: Daemon) -> int:
    """Start the daemon and return its pid once it has installed its signal handlers and logged a line."""
    daemon.start()
    deadline = time.monotonic() + 10
    while "ready" not in daemon.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = daemon.pid()
    assert pid is not None
    return pid


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    daemon = create_sleeping_daemon(tmp_path, ignore_sigterm=True)
    pid = start_and_wait(daemon)

    daemon.stop(grace_seconds=0.2)

    assert read_start_time(pid) is None


def test_reused_pid_is_not_signalled(tmp_path: Path) -> None:
    daemon = create_sleeping_daemon(tmp_path)
    daemon.pid_file.write_text(f"{os.getpid()} 1\n")

    assert daemon.pid() is None
    daemon.stop()

    assert read_start_time(os.getpid()) is not None
