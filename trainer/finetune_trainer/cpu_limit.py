"""Limits the CPU time for processing a file of others; time in which storage is slow does not count."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

TEMPLATE_SECONDS = 10  # for one rendering of a chat template


@contextmanager
def limit_cpu_seconds(seconds: float, error: Exception) -> Iterator[None]:
    """Raise the error when this process has used so much CPU time.

    If native code does not return within the same time again, the kernel ends the process (SIGVTALRM). A limit within
    another one does not apply, and neither does one in other threads than the main one, which get no signals.
    """
    if threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_PROF)):
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise error

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGPROF, previous)
