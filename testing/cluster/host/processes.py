"""Long-running programs of the cluster, known by pid files that also hold the start time (pids are reused)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.commands import ClusterError

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Daemon:
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
        """The pid while this very process runs; None for a pid that meanwhile belongs to another program."""
        try:
            pid, started = (int(word) for word in self.pid_file.read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        return pid if start_time(pid) == started else None

    def start(self) -> None:
        if self.pid() is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid_file.write_text(f"{process.pid} {start_time(process.pid)}\n")

    def stop(self, *, patience_seconds: float = 5) -> None:
        """SIGTERM, then SIGKILL when patience ends."""
        stop_together([self], patience_seconds=patience_seconds)

    def require_running(self) -> None:
        if self.pid() is None:
            raise ClusterError(f"{self.name} has ended; its last words in {self.log}: {self.last_words()}")

    def last_words(self) -> str:
        try:
            return self.log.read_text(errors="replace").strip()[-1000:]
        except FileNotFoundError:
            return "(no log)"


def stop_together(daemons: Iterable[Daemon], *, patience_seconds: float) -> None:
    """At once, so that patience is had once and not for each."""
    stopped = tuple(daemons)
    pids = (daemon.pid() for daemon in stopped)
    end_processes([pid for pid in pids if pid is not None], patience_seconds=patience_seconds)
    for daemon in stopped:
        daemon.pid_file.unlink(missing_ok=True)


def daemons_in(folder: Path) -> tuple[Daemon, ...]:
    """Whatever was started with a pid file in the folder, also what a later version would not start any more."""
    return tuple(Daemon(name=path.stem, argv=(), folder=folder) for path in sorted(folder.glob("*.pid")))


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a live process began; None when it is gone or a zombie."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # ours, if this program started it: a zombie is no running process
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rsplit(")", 1)[1].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def end_processes(pids: Iterable[int], *, patience_seconds: float) -> None:
    """End processes and wait until they are gone; `patience_seconds` 0 kills at once."""
    alive = {pid: started for pid in pids if (started := start_time(pid)) is not None}
    signals = (signal.SIGTERM, signal.SIGKILL) if patience_seconds else (signal.SIGKILL,)
    for number in signals:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + (patience_seconds if number == signal.SIGTERM else 10)
        while alive and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            alive = {pid: started for pid, started in alive.items() if start_time(pid) == started}
        if not alive:
            return
    raise ClusterError(f"processes {sorted(alive)} do not end even by SIGKILL")
