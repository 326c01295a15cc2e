"""Kills all processes that a case started, even in other sessions, by a variable in their environment (Linux only)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARKER = "GPU_CHECK_CASE"
_TIMEOUT_SECONDS = 10.0


def list_marked_pids(mark: str) -> list[int]:
    """Return the processes whose environment at their start contained the mark."""
    entry, pids = f"{MARKER}={mark}".encode(), []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended
            if entry in file.read_bytes().split(b"\0"):
                pids.append(int(file.parent.name))
    return pids


def kill_marked_processes(mark: str) -> int:
    """Send SIGKILL to the processes until none is left, and return how many there were at first."""
    first = list_marked_pids(mark)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    pids = first
    while pids and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        pids = list_marked_pids(mark)  # a process may have forked in between; zombies have no environment
    return len(first)
