"""The program that the supervisor starts: arguments, working directory and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor.contract import Node


@dataclass(frozen=True)
class LaunchProgram:
    """A program to start; `working_dir` and `environment` are inherited if None."""

    argv: tuple[str, ...]
    working_dir: Path | None = None
    environment: Mapping[str, str] | None = None
    signal_group: bool = False  # signal the whole process group: a launcher may not forward signals
    does_own_rendezvous: bool = True


def trainer_program(env: Mapping[str, str]) -> LaunchProgram:
    """Return the program that runs finetune_trainer.entrypoint in every rank."""
    return LaunchProgram((*supervisor_command(), "ranks", "-m", "finetune_trainer.entrypoint"), environment=env)


def supervisor_command() -> tuple[str, ...]:
    """Return the command that starts this package again, with unbuffered output: the zip file that the operator mounts
    into a user's image, or the installed module."""
    archive = getattr(globals().get("__loader__"), "archive", None)
    return (sys.executable, "-u", *([archive] if archive else ["-m", "finetune_supervisor"]))


def enable_flight_recorder(env: Mapping[str, str], node: Node) -> dict[str, str]:
    """Return the environment with torch's flight recorder enabled; variables that are already set take precedence.

    When an NCCL collective times out, each rank then writes its last collectives to a file next to the logs. Both the
    current variable names and those of older torch versions, which a user's image may contain, are set.
    """
    if node.log is None:
        return dict(env)
    dump_prefix = str(node.log.parent / "collectives-rank-")  # torch appends the rank
    defaults = (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), dump_prefix),
    )
    missing = {name: value for names, value in defaults if not any(name in env for name in names) for name in names}
    return {**missing, **env}
