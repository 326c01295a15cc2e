"""Entry point of the trainer container, `python -m finetune_supervisor`.

`... exec PROGRAM ARGS` replaces this process with PROGRAM, which the kernel kills when its parent exits.
`... ranks ...` runs the launcher, see launch/launcher.py.
"""

from __future__ import annotations

import signal

_EARLY_SIGNALS: list[int] = []
# Install the handler before the other imports. The kernel drops signals for which PID 1 has no handler, so a pod that
# is deleted right after its start would otherwise run until its grace period ends.
signal.signal(signal.SIGTERM, lambda number, _frame: _EARLY_SIGNALS.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the entrypoint of the image blocks it

import os  # noqa: E402
import sys  # noqa: E402
from typing import NoReturn  # noqa: E402


def main() -> int:
    """Run the supervisor, the launcher or another program, and return the exit code.

    Each branch imports only its own modules, because in a pod every process compiles the modules that it imports.
    """
    if sys.argv[1:2] in (["exec"], ["ranks"]):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _EARLY_SIGNALS:
            return 128 + signal.SIGTERM
        if sys.argv[1] == "exec":
            _exec_program(sys.argv[2:])
        from finetune_supervisor.launch.launcher import main as launch

        return launch(sys.argv[2:])
    return _run_supervisor()


def _exec_program(program: list[str]) -> NoReturn:
    from finetune_supervisor.launch.child_process import die_with_parent

    die_with_parent()
    os.execv(program[0], program)  # noqa: S606  replacing this process is the purpose


def _run_supervisor() -> int:
    from finetune_supervisor.contract import InvalidEnvironment, Node
    from finetune_supervisor.judge import EXIT_PERMANENT
    from finetune_supervisor.launch.config_files import ConfigMapReplaced, use_verified_config
    from finetune_supervisor.launch.user_command import read_command
    from finetune_supervisor.supervisor import Supervisor, report_replaced_config

    try:
        node = Node.from_environment(os.environ)
        use_verified_config(os.environ)
    except InvalidEnvironment as error:
        print(f"supervisor: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    except ConfigMapReplaced as error:
        return report_replaced_config(node, error)
    return Supervisor(node, read_command(os.environ), early_signal_count=len(_EARLY_SIGNALS)).run()


if __name__ == "__main__":
    sys.exit(main())
