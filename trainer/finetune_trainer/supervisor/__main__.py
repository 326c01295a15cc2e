"""`python -m finetune_trainer.supervisor`: the command of the trainer container.

`... exec PROGRAM ARGS` becomes that program, which ends with its parent; `... ranks ...` is launcher.py.
"""

from __future__ import annotations

import signal

_EARLY: list[int] = []
# Before anything else: what PID 1 has no handler for is lost, and a pod deleted at once would run on for its grace.
signal.signal(signal.SIGTERM, lambda number, _frame: _EARLY.append(number))

import os  # noqa: E402
import sys  # noqa: E402

from .command import read_command  # noqa: E402
from .contract import EnvironmentProblem, Node  # noqa: E402
from .launcher import main as launch  # noqa: E402
from .processes import die_with_parent  # noqa: E402
from .supervise import FAILED_FOR_GOOD, Supervisor  # noqa: E402


def main() -> int:
    if sys.argv[1:2] in (["exec"], ["ranks"]):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _EARLY:
            return 128 + signal.SIGTERM
        if sys.argv[1] == "ranks":
            return launch(sys.argv[2:])
        die_with_parent()
        os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  the very point
    try:
        node = Node.from_environment(os.environ)
    except EnvironmentProblem as problem:
        print(f"supervisor: {problem}", file=sys.stderr)
        return FAILED_FOR_GOOD
    return Supervisor(node, read_command(os.environ), asked_to_stop=len(_EARLY)).run()


if __name__ == "__main__":
    sys.exit(main())
