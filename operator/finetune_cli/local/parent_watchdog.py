"""If the command is killed, its nodes are asked to save and stop, once: by a process that outlives it for a moment.

Not by PR_SET_PDEATHSIG: that comes again with every thread of the parent that ends, and the second SIGTERM means "now".
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """Told of the nodes through a pipe, whose end it takes for the command's death."""

    def __init__(self) -> None:
        # in a session of its own, so that neither Ctrl-C nor a closed terminal reaches it
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def watch(self, pid: int) -> None:
        """From now on this node is stopped if we die."""
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """It has ended, and its number may be another's."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Stops what is still watched."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the nodes are none the worse
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """The process itself."""
    nodes: set[int] = set()
    for line in sys.stdin:
        change = nodes.add if line.startswith("+") else nodes.discard
        change(int(line[1:]))
    for pid in nodes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
