"""Standard output and standard error that write control characters as escapes.

Texts of the cluster, of files and of the command line may contain sequences that change the clipboard, the title or
other lines of a terminal. Only rich, which has its own sequences, and the logs of programs use the stream below.
"""

import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


class EscapingStream:
    """A text stream that writes control characters as escapes, and is otherwise the stream that it wraps."""

    def __init__(self, raw_stream: TextIO) -> None:
        self.raw_stream = raw_stream

    def write(self, text: str) -> int:
        """Write a text, and return the number of characters that were written."""
        if not all(line.isprintable() for line in text.split("\n")):
            from finetune_api.visible_text import escape_controls  # `finetune --help` imports no other package

            text = escape_controls(text)
        return self.raw_stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts, without adding line breaks."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def escape_output() -> None:
    """Let all further output of this process, also of typer and tracebacks, pass through an EscapingStream."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), io.TextIOBase):  # an EscapingStream is none
            setattr(sys, name, EscapingStream(cast(TextIO, stream)))


def get_raw_stdout() -> TextIO:
    """Return standard output without escapes, for text that is escaped already, or that another program reads."""
    return cast(TextIO, getattr(sys.stdout, "raw_stream", sys.stdout))


def open_console() -> "Console":
    """Return a console of rich on standard output; the caller escapes its texts."""
    from rich.console import Console

    return Console(highlight=False, file=get_raw_stdout())
