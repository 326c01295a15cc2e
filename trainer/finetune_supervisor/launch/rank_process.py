"""Process of one rank, which is a fork of the launcher."""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
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
from finetune_supervisor.launch.child_process import die_with_parent, set_process_name


@dataclass(frozen=True)
class RankProgram:
    """Program of every rank: a user's script, or a trainer module with the functions `prepare` and `main`."""

    script: str | None
    module: str | None
    args: tuple[str, ...]

    @classmethod
    def parse(cls, args: list[str]) -> RankProgram:
        """Parse the launcher's arguments: `SCRIPT ARGS` or `-m MODULE ARGS`."""
        if args[0] == "-m":
            return cls(None, args[1], tuple(args[2:]))
        return cls(args[0], None, tuple(args[1:]))

    @property
    def argv(self) -> tuple[str, ...]:
        """Arguments that run the program in a new interpreter."""
        entry = ("-m", self.module) if self.module else (self.script or "",)
        return (sys.executable, "-u", *entry, *self.args)


def build_rank_environment(node: Node, local_rank: int, error_file: Path) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    rank, world_size = str(node.to_global_rank(local_rank)), str(node.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(node.ranks_per_node),
        "GROUP_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(node.num_nodes),
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


def detach_fork(name: str) -> None:
    """Detach a fork from the launcher by setting a new session, process name, signal handlers and NumPy seed."""
    os.setsid()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_process_name(name)
    _write_whole_lines()
    if "numpy" in sys.modules:  # unlike Python, NumPy does not reseed its generator after a fork
        sys.modules["numpy"].random.seed()


def run_rank_program(program: RankProgram, *, in_process: bool) -> int:
    """Run the program in this process and return its exit code, or replace this process with a new interpreter."""
    if not in_process:
        os.execv(program.argv[0], program.argv)  # noqa: S606  replacing this process is the purpose
    run = _load_module(program.module) if program.module else _load_script(program.script or "", program.args)
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:  # omit the frames of this file from the traceback
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals is globals():
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.stderr.flush()
        return 1
    return 0


def exit_without_teardown(code: int) -> NoReturn:
    """Run the atexit handlers and exit without finalizing the interpreter (decisions/303).

    During finalization, live threads of collectives and CUDA may crash or block a rank that has finished, or delay the
    report of its failure (https://github.com/pytorch/pytorch/pull/179291).
    """
    atexit._run_exitfuncs()  # for example the handlers of experiment trackers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_whole_lines() -> None:
    """Make stdout and stderr write a line at a time.

    With PYTHONUNBUFFERED, print writes the text and the line break separately, so that the lines of ranks that print at
    the same time would be mixed up in the log of the node.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _load_module(name: str) -> Callable[[], None]:
    main: Callable[[], None] = importlib.import_module(name).main
    return main


def _load_script(script: str, args: tuple[str, ...]) -> Callable[[], None]:
    """Load the script as `python SCRIPT ARGS` does, and unload the modules of this package.

    The script becomes `__main__`, and its folder the first entry of sys.path.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    main.__dict__.update(__file__=script, __builtins__=builtins, __loader__=loader, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    source = Path(script).read_bytes()
    return lambda: exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  script of the user
