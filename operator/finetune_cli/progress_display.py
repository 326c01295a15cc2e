"""Displays events and progress of a job, with a live line on terminals and plain lines otherwise."""

from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from finetune_api.v1alpha1.status import JobStatus
from finetune_api.visible_text import escape_controls, escape_log_line

PLAIN_INTERVAL_SECONDS = 10.0


class ProgressDisplay:
    """Prints events and progress of a job to the console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Status("", console=console) if console.is_terminal else None
        self._phase: str | None = None
        self._line = ""
        self._printed_at = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def print_line(self, line: str) -> None:
        """Print a permanent line, above the live line if there is one."""
        # soft_wrap does not insert line breaks into paths, so that users can copy them
        self._console.print(Text(escape_controls(line)), soft_wrap=True)

    def print_log(self, line: str) -> None:
        """Print a line of a program's log: with its colours on a terminal, otherwise unchanged."""
        if self._console.is_terminal:
            self._console.out(escape_log_line(line), highlight=False)
        else:
            print(line, file=self._console.file, flush=True)

    def print_event(self, time: datetime, reason: str, message: str) -> None:
        """Print an event with its time in the local time zone."""
        self.print_line(f"{time.astimezone():%H:%M:%S} {reason}: {message}")

    def update(self, status: JobStatus) -> None:
        """Update the live line, or print a plain line at phase changes and every ten seconds."""
        line = format_progress_line(status)
        if line == self._line:
            return
        self._line = line
        if self._live is not None:
            self._live.update(Text(escape_controls(line)))
            return
        now = monotonic()
        if status.phase != self._phase or now - self._printed_at >= PLAIN_INTERVAL_SECONDS:
            self._phase, self._printed_at = status.phase, now
            self.print_line(line)


def format_progress_line(status: JobStatus) -> str:
    """Return the columns of `kubectl get ftj` in one line, without unknown values."""
    display = status.display
    parts = [str(status.phase or "Queued")]
    if display is not None:
        parts += [f"nodes {display.nodes}" if display.nodes else "", display.progress]
        parts += [f"loss {display.loss}" if display.loss else ""]
        parts += [f"{display.tokens_per_second} tokens/s" if display.tokens_per_second else ""]
        parts += [f"ETA {display.eta}" if display.eta else ""]
    if status.restarts:
        parts.append(f"{status.restarts} restart{'s' if status.restarts > 1 else ''}")
    return "  ".join(part for part in parts if part)
