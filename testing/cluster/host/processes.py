"""Daemons of the cluster, tracked by pid files that also contain the start time, because pids are reused."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.commands import HarnessError

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Daemon:
    """A background process with a pid file and a log in `folder`."""

    name: str
    argv: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        return self.folder / f"{self.name}.pid"

    def pid(self) -> int | None:
        """Return the pid while the daemon runs, None if it ended, even if its pid has been reused."""
        try:
            pid, started_at = (int(word) for word in self.pid_file.read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        return pid if start_time(pid) == started_at else None

    def start(self) -> None:
        if self.pid() is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid_file.write_text(f"{process.pid} {start_time(process.pid)}\n")

    def stop(self, *, grace_seconds: float = 5) -> None:
        """Send SIGTERM, and SIGKILL after the grace period."""
        stop_together([self], grace_seconds=grace_seconds)

    def require_running(self) -> None:
        if self.pid() is None:
            raise HarnessError(f"{self.name} has ended; end of {self.log}: {self.log_tail()}")

    def log_tail(self) -> str:
        try:
            return self.log.read_text(errors="replace").strip()[-1000:]
        except FileNotFoundError:
            return "(no log)"


def stop_together(daemons: Iterable[Daemon], *, grace_seconds: float) -> None:
    """Stop several daemons in parallel, with one common grace period."""
    stopped = tuple(daemons)
    pids = (daemon.pid() for daemon in stopped)
    end_processes([pid for pid in pids if pid is not None], grace_seconds=grace_seconds)
    for daemon in stopped:
        daemon.pid_file.unlink(missing_ok=True)


def daemons_in(folder: Path) -> tuple[Daemon, ...]:
    """Return all daemons that have a pid file in the folder, including those of an earlier version."""
    return tuple(Daemon(name=path.stem, argv=(), folder=folder) for path in sorted(folder.glob("*.pid")))


def start_time(pid: int) -> int | None:
    """Return the start time of a running process in clock ticks since boot, None if it ended or is a zombie."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # reap the process if it is a child of this one
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rsplit(")", 1)[1].split()  # the name before it may contain spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def end_processes(pids: Iterable[int], *, grace_seconds: float) -> None:
    """End processes and wait until they are gone; `patience_seconds` 0 kills at once."""
    alive = {pid: started_at for pid in pids if (started_at := start_time(pid)) is not None}
    signals = (signal.SIGTERM, signal.SIGKILL) if grace_seconds else (signal.SIGKILL,)
    for number in signals:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + (grace_seconds if number == signal.SIGTERM else 10)
        while alive and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            alive = {pid: started_at for pid, started_at in alive.items() if start_time(pid) == started_at}
        if not alive:
            return
    raise HarnessError(f"processes {sorted(alive)} did not exit after SIGKILL")
