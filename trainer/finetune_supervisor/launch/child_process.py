"""Runs the program of a node as a child process, copies its output, forwards signals and reaps orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from finetune_supervisor.launch.node_log import NodeLog
from finetune_supervisor.launch.program import LaunchProgram

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_TAIL_BYTES = 65_536  # 64 KiB, enough for the tracebacks of all ranks and their shutdown output


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent exits, so that no rank survives a killed supervisor."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_process_name(name: str) -> None:
    """Set the process name that ps and top show; the kernel truncates it to 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


class ProcessOutput:
    """Copies the output of a node to stdout and to a log file, and keeps the last 64 KiB in memory."""

    def __init__(self, log_file: Path | None) -> None:
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._written_bytes = 0
        self._tail_lock = threading.Lock()  # the supervisor and the thread that copies the program's output write
        self._file = NodeLog(log_file) if log_file else None
        self.log_problem = ""  # why the log file is incomplete

    def log(self, line: str) -> None:
        """Write a log line of the supervisor."""
        self.write(f"supervisor: {line}\n".encode())

    def write(self, chunk: bytes) -> None:
        """Write a chunk of the program's output."""
        with contextlib.suppress(OSError):  # stdout of local mode may be a file on a full disk
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        self._append_to_tail(chunk)
        if self._file is not None:
            self._file.write(chunk)
            if self._file.tasks.problem and not self.log_problem:
                self.log_problem = self._file.tasks.problem
                self.log(f"this log is incomplete in the output: {self.log_problem}")

    def finish(self, write_last_file: Callable[[], object], *, seconds: float) -> None:
        """Write the last file to the claim after the log, and wait for both, but not longer than this time."""
        if self._file is not None:
            self._file.tasks.add(write_last_file)
            self._file.tasks.finish(seconds)

    def _append_to_tail(self, chunk: bytes) -> None:
        with self._tail_lock:
            self._tail.append(chunk)
            self._tail_bytes += len(chunk)
            self._written_bytes += len(chunk)
            while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())

    def read_tail(self) -> str:
        """Return the last 64 KiB of the output."""
        return self.read_after(0)[0].decode("utf-8", "replace")

    def read_after(self, position: int) -> tuple[bytes, int]:
        """Return the output after a position, but at most the last 64 KiB, and the position of its end in bytes."""
        with self._tail_lock:
            chunks, end = tuple(self._tail), self._written_bytes
        size = min(end - position, _TAIL_BYTES)
        return (b"".join(chunks)[-size:] if size > 0 else b""), end


class ChildProcess:
    """Process of the node's program, which has its own session so that Ctrl-C stops only the supervisor."""

    def __init__(self, program: LaunchProgram, *, output: ProcessOutput) -> None:
        self._signals_process_group = program.signals_process_group
        self._process = subprocess.Popen(
            program.argv,
            cwd=program.working_dir,
            env=program.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._copier = threading.Thread(target=self._copy_output, args=(output,), daemon=True)
        self._copier.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def reap(self) -> int | None:
        """Reap all exited processes, since PID 1 inherits orphans, and return the exit code of the child or None."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self._process.returncode
            if pid == 0:
                return self._process.returncode
            if pid == self.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, or to its process group if the program requires that."""
        if self._signals_process_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
                os.killpg(self.pid, number)
        elif self._process.returncode is None:
            os.kill(self.pid, number)

    def has_survivors(self) -> bool:
        """Return whether the process group still has processes; a launcher may exit before torchrun does."""
        if not self._signals_process_group:
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def wait_for_output(self, seconds: float) -> None:
        """Wait until all output is copied, with a timeout because a grandchild may keep the pipe open."""
        self._copier.join(seconds)

    def _copy_output(self, output: ProcessOutput) -> None:
        pipe = self._process.stdout
        assert pipe is not None  # always set with stdout=PIPE
        while chunk := os.read(pipe.fileno(), 2**14):
            output.write(chunk)


class SignalInbox:
    """Counts stop signals, so that only the main loop handles them."""

    def __init__(self, stop_count: int) -> None:
        self.stop_count = stop_count
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._count_stop_signal)
        signal.signal(signal.SIGINT, self._count_stop_signal)
        signal.signal(signal.SIGCHLD, self._ignore_signal)  # without a handler, the signal would not interrupt `wait`

    def wait(self, seconds: float) -> None:
        """Wait until a signal arrives or the timeout expires."""
        if select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, 4096)

    def _count_stop_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop_count += 1

    def _ignore_signal(self, _number: int, _frame: FrameType | None) -> None:
        pass
