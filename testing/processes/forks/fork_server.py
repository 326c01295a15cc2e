"""Run Python programs in forks of a process that has imported their libraries, which takes 5 s in a new interpreter.

`start_fork_server` starts such a process. With the environment variables of `use_forks`, `sitecustomize` in this folder
lets a fork run the program of a new interpreter. The fork has the arguments, variables, working directory and standard
streams of that interpreter, which ends with it. Programs that need other imports run in an interpreter of their own.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from finetune_supervisor.launch.rank_process import exit_without_teardown
from finetune_trainer.lazy_imports import find_unused_libraries

TRAINER = "finetune_trainer.train"
ADDRESS_VARIABLE = "TEST_FORK_SERVER"
FOLDER = Path(__file__).parent
MAX_REQUEST_BYTES = 100_000
# libraries read these variables when they are imported
VARIABLES_OF_IMPORTS = {
    **dict.fromkeys(("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "MODELSCOPE_ENDPOINT"), ""),
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def use_forks(environment: Mapping[str, str], *, module: str = TRAINER) -> dict[str, str]:
    """Return the environment variables with which forks of a process that has imported the module run programs."""
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists():  # a fork of a process that uses a GPU cannot use it
        return dict(environment)
    path = os.pathsep.join(filter(None, (str(FOLDER), environment.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path, ADDRESS_VARIABLE: start_fork_server(module)}


@cache
def start_fork_server(module: str) -> str:
    """Start a process that imports the module, which ends with this process, and return its address."""
    address = f"finetune-forks-{os.getpid()}-{module}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen(64)
        variables = {**os.environ, **VARIABLES_OF_IMPORTS, "PYTHONPATH": os.pathsep.join(sys.path)}
        server = subprocess.Popen(
            (sys.executable, "-u", __file__, str(listener.fileno()), module),
            env={name: value for name, value in variables.items() if value},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )
    atexit.register(server.communicate)  # the server ends at the end of its stdin
    return address


def main(descriptor: int, module: str, hidden: frozenset[str]) -> None:
    """Import the module, then run one program for each connection until stdin ends."""
    gc.disable()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes `import` raise ModuleNotFoundError
    importlib.import_module(module)
    gc.freeze()
    gc.enable()
    listener = socket.socket(fileno=descriptor)
    end_of_tests = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([listener.fileno(), end_of_tests], [], [])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if end_of_tests in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            run_program(connection, hidden)
        connection.close()


def run_program(connection: socket.socket, hidden: frozenset[str]) -> NoReturn:
    """Run the requested program in a fork, which is killed if the connection ends first, and send its wait status."""
    message, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become_program(json.loads(message), descriptors, hidden)
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(BrokenPipeError):
        connection.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([connection.fileno(), ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        connection.send(str(status).encode())
    os._exit(0)


def become_program(request: dict[str, Any], descriptors: list[int], hidden: frozenset[str]) -> NoReturn:
    """Run `python OPTIONS -m MODULE ARGUMENTS` in this process, or in a new interpreter if it needs other imports."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    argv, variables = request["argv"], request["variables"]
    paths = [path for path in variables["PYTHONPATH"].split(os.pathsep) if path != str(FOLDER)]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    if needs_other_imports(argv, variables, hidden):
        os.execve(sys.executable, argv, variables)  # noqa: S606  replacing this process is the purpose
    os.environ.clear()
    os.environ.update(variables)
    module, *arguments = argv[argv.index("-m") + 1 :]
    sys.orig_argv, sys.argv = argv, ["", *arguments]
    code = 0
    try:
        for startup_file in (Path(path, "sitecustomize.py") for path in paths):
            if startup_file.is_file():
                runpy.run_path(str(startup_file))
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_without_teardown(code)


def needs_other_imports(argv: list[str], variables: dict[str, str], hidden: frozenset[str]) -> bool:
    """Return whether the program sets variables that imports read, or its job needs one of the hidden libraries."""
    if any(variables.get(name, value) != value for name, value in VARIABLES_OF_IMPORTS.items()):
        return True
    if not hidden:
        return False
    spec_file = Path(variables["FINETUNE_CONFIG"] if "ranks" in argv else argv[argv.index("-m") + 2])
    try:
        return not hidden <= set(find_unused_libraries(json.loads(spec_file.read_bytes())))
    except (OSError, ValueError):
        return True


if __name__ == "__main__":
    # most jobs do not need some libraries, which the trainer hides before other libraries look for them
    main(int(sys.argv[1]), sys.argv[2], frozenset(find_unused_libraries({}) if sys.argv[2] == TRAINER else ()))
