"""Processes: a child that dies with us, its output copied, its orphans reaped."""

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
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from finetune_supervisor.launch.program import Program

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_TAIL_BYTES = 65_536  # tracebacks of all ranks of a node, with what each says while it is stopped


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, so that a killed supervisor leaves no training behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """For lists of processes; at most 15 bytes of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


class Output:
    """Where the node's lines go: our own stdout and a file beside the job's results; the end is kept in memory."""

    def __init__(self, log_file: Path | None) -> None:
        self._tail: deque[bytes] = deque()
        self._kept = 0
        self._file: BinaryIO | None = None
        if log_file is None:
            return
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            self._file = log_file.open("ab", buffering=0)
        except OSError as error:
            self.say(f"this log is not kept in the output: {error}")

    def say(self, line: str) -> None:
        self.write(f"supervisor: {line}\n".encode())

    def write(self, chunk: bytes) -> None:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        self._tail.append(chunk)
        self._kept += len(chunk)
        while self._kept - len(self._tail[0]) >= _TAIL_BYTES:
            self._kept -= len(self._tail.popleft())
        if self._file is None:
            return
        try:
            self._file.write(chunk)
        except OSError as error:  # a full disk must not stop the training
            self._file = None
            self.say(f"this log is no longer kept in the output: {error}")

    def tail(self) -> str:
        return b"".join(tuple(self._tail))[-_TAIL_BYTES:].decode("utf-8", "replace")


class Child:
    """The launcher, in a session of its own: a Ctrl-C in the terminal reaches us, not it."""

    def __init__(self, program: Program, *, output: Output) -> None:
        self._group = program.group
        self._process = subprocess.Popen(
            program.argv,
            cwd=program.folder,
            env=program.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._copier = threading.Thread(target=self._copy, args=(output,), daemon=True)
        self._copier.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def reap(self) -> int | None:
        """Collect every process that ended (PID 1 inherits orphans); the child's exit code once it is among them."""
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
        if self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
                os.killpg(self.pid, number)
        elif self._process.returncode is None:
            os.kill(self.pid, number)

    def is_left(self) -> bool:
        """Whether others of its group outlive it: a launcher that ends at SIGTERM, while its torchrun still saves."""
        if not self._group:
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def wait_for_output(self, seconds: float) -> None:
        """Until all was copied; a grandchild that lives on may keep the pipe open."""
        self._copier.join(seconds)

    def _copy(self, output: Output) -> None:
        pipe = self._process.stdout
        assert pipe is not None  # asked for above
        while chunk := os.read(pipe.fileno(), 65_536):
            output.write(chunk)


class SignalInbox:
    """Signals as things to be read, so that the main loop alone acts on them."""

    def __init__(self, stops: int) -> None:
        self.stops = stops
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._count)
        signal.signal(signal.SIGINT, self._count)
        signal.signal(signal.SIGCHLD, self._ignore)  # only so that it wakes us

    def wait(self, seconds: float) -> None:
        """Until a signal comes or the time is over."""
        if select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, 4096)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.stops += 1

    def _ignore(self, _number: int, _frame: FrameType | None) -> None:
        pass
