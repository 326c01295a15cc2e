"""Reads the progress of a user command from its output, for a command that posts none (decisions/311)."""

from __future__ import annotations

import re
import time

from finetune_supervisor.contract import Node
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.liveness.heartbeat import Heartbeat
from finetune_supervisor.status.command_heartbeat import CommandHeartbeatBuilder
from finetune_supervisor.status.progress_lines import ProgressLines

_INTERVAL_SECONDS = 1.0
_MAX_LINE_BYTES = 4096
_SEPARATOR = re.compile(rb"[\r\n]+")  # tqdm ends the state of a bar with a carriage return
_HINTS = (b"%|", b"oss", b"poch")  # one of them is in every line with progress


class LogProgress:
    """Progress in the output of the node, as a heartbeat that is only displayed: no file contains it.

    It reads what the supervisor keeps of the output anyway, so that the program never waits for it.
    """

    def __init__(self, node: Node) -> None:
        self.heartbeats: tuple[Heartbeat, ...] = ()
        self._builder = CommandHeartbeatBuilder(node)
        self._lines = ProgressLines()
        self._position = 0
        self._unfinished_line = b""
        self._read_at = float("-inf")

    def update(self, output: ProcessOutput, *, now: float) -> None:
        """Read the new output, at most once per second; `now` is in seconds of a monotonic clock."""
        if now - self._read_at >= _INTERVAL_SECONDS:
            self._read_at = now
            self._read(output, is_final=False)

    def finish(self, output: ProcessOutput) -> None:
        """Read the rest of the output of a program that has ended."""
        self._read(output, is_final=True)

    def _read(self, output: ProcessOutput, *, is_final: bool) -> None:
        chunk, end = output.read_after(self._position)
        is_complete, self._position = end - len(chunk) == self._position, end
        *lines, rest = _SEPARATOR.split(self._unfinished_line + chunk if is_complete else chunk)
        if not is_complete:  # the first line has lost its beginning
            lines = lines[1:]
        # A line that has not grown for one interval is complete, because the last state of a bar has no separator yet.
        if is_final or (rest == self._unfinished_line and not chunk):
            lines.append(rest)
        self._unfinished_line = rest[: _MAX_LINE_BYTES + 1]  # a line that is longer is ignored when it ends
        self._read_lines(lines)

    def _read_lines(self, lines: list[bytes]) -> None:
        progress_before = self._lines.progress
        for line in lines:
            if len(line) <= _MAX_LINE_BYTES and any(hint in line for hint in _HINTS):
                self._lines.read(line.decode("utf-8", "replace"))
        progress = self._lines.progress
        if progress is not None and progress != progress_before:
            self.heartbeats = (self._builder.build(progress, now=time.time()),)
