"""One rank: a fork of the launcher that becomes the program it was made for."""

from __future__ import annotations

import atexit
import builtins
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from finetune_supervisor.contract import Node
from finetune_supervisor.launch.child_process import die_with_parent, name_process


@dataclass(frozen=True)
class Target:
    """What every rank runs: a script with its words, or a module of ours with `prepare` and `main`."""

    script: str | None
    module: str | None
    args: tuple[str, ...]

    @classmethod
    def read(cls, words: list[str]) -> Target:
        if words[0] == "-m":
            return cls(None, words[1], tuple(words[2:]))
        return cls(words[0], None, tuple(words[1:]))

    @property
    def argv(self) -> tuple[str, ...]:
        """As a process of its own."""
        what = ("-m", self.module) if self.module else (self.script or "",)
        return (sys.executable, "-u", *what, *self.args)


def rank_environment(node: Node, local_rank: int, error_file: Path) -> dict[str, str]:
    """torchrun's variables, by its names."""
    rank, world_size = str(node.global_rank(local_rank)), str(node.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(node.ranks_per_node),
        "GROUP_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(node.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": node.master_addr,
        "MASTER_PORT": str(node.master_port),
        "TORCHELASTIC_RUN_ID": f"{node.uid}-{node.attempt}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def settle(name: str) -> None:
    """Make a fresh fork a process of its own: its group, its name, signals as Python sets them, its dice."""
    os.setsid()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name_process(name)
    if "numpy" in sys.modules:  # Python's own are thrown anew at every fork
        sys.modules["numpy"].random.seed()


def become(target: Target, *, in_place: bool) -> int:
    """The program's exit code, if it runs in this process; else this process becomes it."""
    if not in_place:
        os.execv(target.argv[0], target.argv)  # noqa: S606  the very point
    run = _module(target.module) if target.module else _script(target.script or "", target.args)
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:  # told as if nobody had called it
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals is globals():
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.stderr.flush()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as Python does, but without taking the interpreter down, where threads of collectives and of GPUs
    that are still about may crash or stop a rank whose work is done, or of whose failure others wait to hear
    (https://github.com/pytorch/pytorch/pull/179291)."""
    atexit._run_exitfuncs()  # of experiment trackers, for one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _module(name: str) -> Callable[[], None]:
    main: Callable[[], None] = importlib.import_module(name).main
    return main


def _script(script: str, args: tuple[str, ...]) -> Callable[[], None]:
    """As `python SCRIPT ARGS` does: it is `__main__`, with its folder first on the path and nothing of ours."""
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    main.__dict__.update(__file__=script, __builtins__=builtins, __loader__=loader, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    source = Path(script).read_bytes()
    return lambda: exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  the very point
