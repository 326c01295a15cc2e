"""What a run shows: one live line on a terminal, plain lines elsewhere, and events above it."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from finetune_api.v1alpha1.status import JobStatus

Raw = dict[str, Any]

PLAIN_EVERY_SECONDS = 10.0


class Screen:
    """The terminal of the person who waits."""

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

    def say(self, line: str) -> None:
        """One line that stays."""
        # soft_wrap: a path that is broken over two lines cannot be copied
        self._console.print(Text(line), soft_wrap=True)

    def event(self, event: Raw) -> None:
        """A transition, as `kubectl get events` would list it."""
        at = event["lastTimestamp"][11:19]
        self.say(f"{at} {event['reason']}: {event['message']}")

    def show(self, status: JobStatus) -> None:
        """Where the job stands now."""
        line = progress_line(status)
        if line == self._line:
            return
        self._line = line
        if self._live is not None:
            self._live.update(Text(line))
            return
        now = time.monotonic()
        if status.phase != self._phase or now - self._printed_at >= PLAIN_EVERY_SECONDS:
            self._phase, self._printed_at = status.phase, now
            self.say(line)


def progress_line(status: JobStatus) -> str:
    """The columns of `kubectl get ftj` in one line; what is not known is left out."""
    shown = status.display
    parts = [str(status.phase or "Queued")]
    if shown is not None:
        parts += [f"nodes {shown.nodes}" if shown.nodes else "", shown.progress]
        parts += [f"loss {shown.loss}" if shown.loss else ""]
        parts += [f"{shown.tokens_per_second} tokens/s" if shown.tokens_per_second else ""]
        parts += [f"ETA {shown.eta}" if shown.eta else ""]
    if status.restarts:
        parts.append(f"{status.restarts} restart{'s' if status.restarts > 1 else ''}")
    return "  ".join(part for part in parts if part)
