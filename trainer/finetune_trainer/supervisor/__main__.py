"""`python -m finetune_trainer.supervisor`: the command of the trainer container.

`... exec PROGRAM ARGS` becomes that program, which ends with its parent.
"""

from __future__ import annotations

import os
import sys

from .command import read_command
from .contract import EnvironmentProblem, Node
from .processes import die_with_parent
from .supervise import FAILED_FOR_GOOD, Supervisor


def main() -> int:
    if sys.argv[1:2] == ["exec"]:
        die_with_parent()
        os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  the very point
    try:
        node = Node.from_environment(os.environ)
    except EnvironmentProblem as problem:
        print(f"supervisor: {problem}", file=sys.stderr)
        return FAILED_FOR_GOOD
    return Supervisor(node, read_command(os.environ)).run()


if __name__ == "__main__":
    sys.exit(main())
