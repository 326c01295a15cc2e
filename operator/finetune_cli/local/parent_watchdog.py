"""Watchdog process that sends SIGTERM to the nodes if the command is killed, so that they save a checkpoint.

PR_SET_PDEATHSIG does not work here: the kernel sends the signal again for every thread of the parent that exits, and a
second SIGTERM means "stop without saving".
"""

import contextlib
import os
import signal
import subprocess
import sys


class ParentWatchdog:
    """Starts the watchdog process and sends it the pids of the nodes through a pipe.

    The kernel closes the pipe if the command is killed.
    """

    def __init__(self) -> None:
        # use a new session, so that neither Ctrl-C nor a closed terminal ends the watchdog
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def watch(self, pid: int) -> None:
        """Register the process of a node, so that it is stopped if the command is killed."""
        self._send(f"+{pid}\n")

    def unwatch(self, pid: int) -> None:
        """Unregister a process that has ended, because its pid may be reused."""
        self._send(f"-{pid}\n")

    def close(self) -> None:
        """Stop the watchdog; on exit it terminates all processes that are still registered."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed; nodes can run without it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """Read pids from stdin, and send SIGTERM to the registered processes at end of file."""
    pids: set[int] = set()
    for line in sys.stdin:
        update = pids.add if line.startswith("+") else pids.discard
        update(int(line[1:]))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
