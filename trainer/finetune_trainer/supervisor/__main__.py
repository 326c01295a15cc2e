"""`python -m finetune_trainer.supervisor`: the command of the trainer container."""

from __future__ import annotations

import os
import sys

from .contract import EnvironmentProblem, Node
from .supervise import FAILED_FOR_GOOD, Supervisor, torchrun_command


def main() -> int:
    try:
        node = Node.from_environment(os.environ)
    except EnvironmentProblem as problem:
        print(f"supervisor: {problem}", file=sys.stderr)
        return FAILED_FOR_GOOD
    return Supervisor(node, command=torchrun_command(node)).run()


if __name__ == "__main__":
    sys.exit(main())
