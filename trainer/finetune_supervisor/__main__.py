"""`python -m finetune_supervisor`: the command of the trainer container.

`... exec PROGRAM ARGS` becomes that program, which ends with its parent; `... ranks ...` is launcher.py.
"""

from __future__ import annotations

import signal

_EARLY: list[int] = []
# Before anything else: what PID 1 has no handler for is lost, and a pod deleted at once would run on for its grace.
signal.signal(signal.SIGTERM, lambda number, _frame: _EARLY.append(number))

import os  # noqa: E402
import sys  # noqa: E402
from typing import NoReturn  # noqa: E402


def main() -> int:
    """Each imports its own: in a pod the sources are compiled anew, by every process that imports them."""
    if sys.argv[1:2] in (["exec"], ["ranks"]):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _EARLY:
            return 128 + signal.SIGTERM
        if sys.argv[1] == "exec":
            _become(sys.argv[2:])
        from finetune_supervisor.launch.launcher import main as launch

        return launch(sys.argv[2:])
    return _supervise()


def _become(program: list[str]) -> NoReturn:
    from finetune_supervisor.launch.child_process import die_with_parent

    die_with_parent()
    os.execv(program[0], program)  # noqa: S606  the very point


def _supervise() -> int:
    from finetune_supervisor.contract import EnvironmentProblem, Node
    from finetune_supervisor.launch.user_command import read_command
    from finetune_supervisor.supervisor import FAILED_FOR_GOOD, Supervisor

    try:
        node = Node.from_environment(os.environ)
    except EnvironmentProblem as problem:
        print(f"supervisor: {problem}", file=sys.stderr)
        return FAILED_FOR_GOOD
    return Supervisor(node, read_command(os.environ), asked_to_stop=len(_EARLY)).run()


if __name__ == "__main__":
    sys.exit(main())
