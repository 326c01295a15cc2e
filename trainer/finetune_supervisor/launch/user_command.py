"""spec.command as this node runs it: the user's script in every rank, or the user's own launcher."""

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
from finetune_supervisor.launch.program import Program, own_program

_VARIABLE = re.compile(r"\$?\$\((\w+)\)")


class InvalidCommand(Exception):
    """spec.command names what is not there; only a change of the job or its image helps."""


@dataclass(frozen=True)
class Command:
    """spec.command, which the operator's models have checked."""

    script: str | None
    args: tuple[str, ...]
    exec: tuple[str, ...]
    working_dir: str | None


def read_command(env: Mapping[str, str]) -> Command | None:
    """None if the job is the trainer's, which also says what is wrong with a spec that cannot be read."""
    try:
        raw = json.loads(Path(env.get(contract.CONFIG, "")).read_text(encoding="utf-8")).get("command")
    except (OSError, ValueError, AttributeError):
        return None
    if not raw:
        return None
    words = {name: tuple(raw.get(name) or ()) for name in ("args", "exec")}
    return Command(script=raw.get("script"), working_dir=raw.get("workingDir"), **words)


def plan_program(command: Command, node: Node, env: Mapping[str, str]) -> Program:
    """What to start, and where. Raises InvalidCommand."""
    folder = Path(os.path.abspath(command.working_dir or "."))
    if not folder.is_dir():
        raise InvalidCommand(f"spec.command.workingDir: {command.working_dir}: no such folder in the image or a volume")
    # where a torchrun that is started by the program puts the errors of scripts that record them
    env = {**env, "PET_LOG_DIR": str(node.run.torchrun)}
    if command.script is None:
        return Program(_exec(command, folder, env), folder, env, group=True, meets=False)
    if not (folder / command.script).is_file():
        raise InvalidCommand(f"spec.command.script: {command.script}: no such file in {folder}")
    return _script(command.script, command.args, folder, env)


def expand(word: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes has it: `$$(NAME)` is `$(NAME)`, and a name that is unknown stays as it is."""

    def value(match: re.Match[str]) -> str:
        found = match.group(0)
        return found[1:] if found.startswith("$$") else env.get(match.group(1), found)

    return _VARIABLE.sub(value, word)


def _exec(command: Command, folder: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    program, *rest = (expand(word, env) for word in command.exec)
    found = str(folder / program) if "/" in program else shutil.which(program, path=env.get("PATH"))
    if found is None or not os.access(found, os.X_OK):
        raise InvalidCommand(f"spec.command.exec: {program}: no such program in the image (PATH={env.get('PATH', '')})")
    return (*own_program(), "exec", found, *rest)


def _script(script: str, args: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> Program:
    """By our launcher where python3 has torch, else by a torchrun of another Python."""
    words = (script, *(expand(word, env) for word in args))
    if importlib.util.find_spec("torch") is not None:
        return Program((*own_program(), "ranks", *words), folder, env)
    torchrun = shutil.which("torchrun", path=env.get("PATH"))
    if torchrun is None:
        raise InvalidCommand(
            f"spec.image: {sys.executable} has no torch, and there is no torchrun on the PATH ({env.get('PATH', '')});"
            " use an image with torch, or spec.command.exec"
        )
    errors = ("--max_restarts=0", f"--log_dir={env['PET_LOG_DIR']}")  # restarts are the operator's: all nodes together
    return Program((*own_program(), "exec", torchrun, *errors, *words), folder, env, meets=False)
