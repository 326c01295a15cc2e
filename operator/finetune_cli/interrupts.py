"""Signals that end a command, after it has deleted its temporary objects."""

import signal
from types import FrameType
from typing import NoReturn


class Interrupted(SystemExit):
    """Raised in the main thread by the first signal; the exit code is 128 plus its number, as in a shell."""

    code: int


def list_end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command; without SIGHUP if it is ignored, as after `nohup`."""
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_hangup_ignored else (signal.SIGHUP,)))


def raise_on_signals() -> None:
    """Raise Interrupted at the first signal; a second one ends the process at once."""

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        end_on_signals()
        raise Interrupted(128 + number)

    for number in list_end_signals():
        signal.signal(number, interrupt)


def end_on_signals() -> None:
    """Let a signal end the process at once, for commands that create nothing temporary."""
    for number in list_end_signals():
        signal.signal(number, signal.SIG_DFL)
