"""Lets a fork of the server in fork_server.py run the program of this interpreter, if it is one of the trainer."""

import ctypes
import json
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_SCRIPTS = os.path.dirname(os.path.dirname(__file__))


def can_run_in_fork(argv: list[str]) -> bool:
    """Return whether the program is a forecast, or a launcher of ranks of the trainer or of a script for tests."""
    match argv[argv.index("-m") + 1 :] if "-m" in argv else []:
        case ["finetune_trainer.memory", *_] | ["finetune_supervisor", "ranks", "-m", *_]:
            return True
        case ["finetune_supervisor", "ranks", script, *_]:
            return os.path.dirname(script) == _SCRIPTS
    return False


def run_in_fork(address: str) -> int:
    """Run the program in a fork of the server at this address, and return its wait status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the end of this process kills the fork
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{address}")
        request = {"argv": sys.orig_argv, "variables": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(connection.recv(100))
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
        return int(connection.recv(100))


def exit_with_status(status: int) -> None:
    """End this process like the fork: with its exit code, or by the signal that ended it."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if "TEST_FORK_SERVER" in os.environ and can_run_in_fork(sys.orig_argv):
    exit_with_status(run_in_fork(os.environ["TEST_FORK_SERVER"]))
