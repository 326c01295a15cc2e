"""Plans the program for spec.command: a user's script in every rank, or a user's own launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.launch.program import LaunchProgram, build_supervisor_command

_VARIABLE_REFERENCE = re.compile(r"\$?\$\((\w+)\)")


class InvalidCommand(Exception):
    """spec.command names a missing file or program, so the job or its image must be changed."""


@dataclass(frozen=True)
class UserCommand:
    """Parsed spec.command, which the operator has already validated."""

    script: str | None
    args: tuple[str, ...]
    exec: tuple[str, ...]
    working_dir: str | None
    reads_log: bool = True  # whether progress is read from the log if the command posts none


def read_command(env: Mapping[str, str]) -> UserCommand | None:
    """Return spec.command, or None if the spec has no command or is unreadable, which finetune_trainer reports."""
    try:
        raw = json.loads(Path(env.get(contract.CONFIG, "")).read_text(encoding="utf-8")).get("command")
    except (OSError, ValueError, AttributeError):
        return None
    if not raw:
        return None
    arguments = {name: tuple(raw.get(name) or ()) for name in ("args", "exec")}
    reads_log = raw.get("progressFrom") != contract.PROGRESS_FROM_POSTS
    return UserCommand(script=raw.get("script"), working_dir=raw.get("workingDir"), reads_log=reads_log, **arguments)


def plan_program(command: UserCommand, node: Node, env: Mapping[str, str]) -> LaunchProgram:
    """Return the program that runs this command. Raises InvalidCommand."""
    folder = Path(os.path.abspath(command.working_dir or "."))
    if not folder.is_dir():
        raise InvalidCommand(f"spec.command.workingDir: {command.working_dir}: no such folder in the image or a volume")
    # Folder for the error files of scripts with @record that run under the user's torchrun.
    env = {**env, "PET_LOG_DIR": str(node.run_folder.error_files)}
    if command.script is None:
        argv = _build_exec_argv(command, folder, env)
        return LaunchProgram(argv, folder, env, signals_process_group=True, has_own_rendezvous=False)
    if not (folder / command.script).is_file():
        raise InvalidCommand(f"spec.command.script: {command.script}: no such file in {folder}")
    return _plan_script_program(command.script, command.args, folder, env)


def expand_variables(argument: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as Kubernetes does; `$$(NAME)` is an escape, and unknown names are unchanged."""

    def expand(match: re.Match[str]) -> str:
        reference = match.group(0)
        return reference[1:] if reference.startswith("$$") else env.get(match.group(1), reference)

    return _VARIABLE_REFERENCE.sub(expand, argument)


def _build_exec_argv(command: UserCommand, folder: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    program, *arguments = (expand_variables(argument, env) for argument in command.exec)
    path = str(folder / program) if "/" in program else shutil.which(program, path=env.get("PATH"))
    if path is None or not os.access(path, os.X_OK):
        raise InvalidCommand(f"spec.command.exec: {program}: no such program in the image (PATH={env.get('PATH', '')})")
    return (*build_supervisor_command(), "exec", path, *arguments)


def _plan_script_program(script: str, args: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> LaunchProgram:
    """Return the launcher if this Python has torch, otherwise torchrun from the PATH."""
    argv = (script, *(expand_variables(argument, env) for argument in args))
    if importlib.util.find_spec("torch") is not None:
        return LaunchProgram((*build_supervisor_command(), "ranks", *argv), folder, env)
    torchrun = shutil.which("torchrun", path=env.get("PATH"))
    if torchrun is None:
        raise InvalidCommand(
            f"spec.image: {sys.executable} has no torch, and there is no torchrun on the PATH ({env.get('PATH', '')});"
            " use an image with torch, or spec.command.exec"
        )
    options = ("--max_restarts=0", f"--log_dir={env['PET_LOG_DIR']}")  # the operator restarts all nodes together
    return LaunchProgram(
        (*build_supervisor_command(), "exec", torchrun, *options, *argv), folder, env, has_own_rendezvous=False
    )
