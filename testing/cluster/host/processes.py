"""Start and stop daemons, tracked by pid files that also contain the start time, because pids are reused."""

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
        """Return the pid of the running daemon, or None if it has ended, even if its pid has been reused."""
        try:
            pid, started_at = (int(word) for word in self.pid_file.read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        return pid if read_start_time(pid) == started_at else None

    def start(self) -> None:
        if self.pid() is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid_file.write_text(f"{process.pid} {read_start_time(process.pid)}\n")

    def stop(self, *, grace_seconds: float = 5) -> None:
        """Send SIGTERM, and SIGKILL after the grace period."""
        stop_all([self], grace_seconds=grace_seconds)

    def require_running(self) -> None:
        if self.pid() is None:
            raise HarnessError(f"{self.name} has ended; end of {self.log}: {self.read_log_tail()}")

    def read_log_tail(self) -> str:
        try:
            return self.log.read_text(errors="replace").strip()[-1000:]
        except FileNotFoundError:
            return "(no log)"


def stop_all(daemons: Iterable[Daemon], *, grace_seconds: float) -> None:
    """Stop several daemons in parallel, with a common grace period."""
    stopped = tuple(daemons)
    pids = (daemon.pid() for daemon in stopped)
    terminate_processes([pid for pid in pids if pid is not None], grace_seconds=grace_seconds)
    for daemon in stopped:
        daemon.pid_file.unlink(missing_ok=True)


def find_daemons(folder: Path) -> tuple[Daemon, ...]:
    """Return all daemons that have a pid file in the folder, including daemons of an earlier version."""
    return tuple(Daemon(name=path.stem, argv=(), folder=folder) for path in sorted(folder.glob("*.pid")))


def read_start_time(pid: int) -> int | None:
    """Return the start time of a running process in clock ticks since boot, or None if it has ended or is a zombie."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # reap the process if it is a child of this process
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rsplit(")", 1)[1].split()  # the process name may contain spaces and ends at the last ")"
    return None if fields[0] in "ZX" else int(fields[19])


def terminate_processes(pids: Iterable[int], *, grace_seconds: float) -> None:
    """Terminate processes and wait until they have ended; a grace period of 0 sends SIGKILL at once."""
    live_processes = {pid: started_at for pid in pids if (started_at := read_start_time(pid)) is not None}
    signals = (signal.SIGTERM, signal.SIGKILL) if grace_seconds else (signal.SIGKILL,)
    for signal_number in signals:
        for pid in live_processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        deadline = time.monotonic() + (grace_seconds if signal_number == signal.SIGTERM else 10)
        while live_processes and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            live_processes = {
                pid: started_at for pid, started_at in live_processes.items() if read_start_time(pid) == started_at
            }
        if not live_processes:
            return
    raise HarnessError(f"processes {sorted(live_processes)} did not exit after SIGKILL")
