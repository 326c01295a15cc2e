"""Programs that the supervisor starts, with their arguments and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor.contract import Node


@dataclass(frozen=True)
class LaunchProgram:
    """Program to start; a `working_dir` or `environment` of None is inherited."""

    argv: tuple[str, ...]
    working_dir: Path | None = None
    environment: Mapping[str, str] | None = None
    signals_process_group: bool = False  # for launchers that do not forward signals
    has_own_rendezvous: bool = True


def plan_trainer_program(env: Mapping[str, str]) -> LaunchProgram:
    """Return the program that runs finetune_trainer in every rank."""
    return LaunchProgram((*build_supervisor_command(), "ranks", "-m", "finetune_trainer.entrypoint"), environment=env)


def build_supervisor_command() -> tuple[str, ...]:
    """Return the command that runs this package with unbuffered output.

    It runs the installed module, or the zip file that the operator mounts into a user's image.
    """
    archive = getattr(globals().get("__loader__"), "archive", None)
    return (sys.executable, "-u", *([archive] if archive else ["-m", "finetune_supervisor"]))


def enable_flight_recorder(env: Mapping[str, str], node: Node) -> dict[str, str]:
    """Add the variables that enable torch's flight recorder; existing variables take precedence.

    When an NCCL collective times out, each rank writes its last collectives to a file next to the logs. The variable
    names of older torch versions are set, too, because a user's image may contain an older torch.
    """
    if node.log is None:
        return dict(env)
    dump_prefix = str(node.log.parent / "collectives-rank-")  # torch appends the rank
    for path in node.log.parent.glob("collectives-rank-*"):  # torch would follow a link
        if path.is_symlink():
            path.unlink()
    defaults = (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), dump_prefix),
    )
    missing_variables = {
        name: value for names, value in defaults if not any(name in env for name in names) for name in names
    }
    return {**missing_variables, **env}
