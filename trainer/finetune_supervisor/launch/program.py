"""What the supervisor starts and watches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor.contract import Node


@dataclass(frozen=True)
class Program:
    """A child to be: its words, its folder and its environment, where they are not our own."""

    argv: tuple[str, ...]
    folder: Path | None = None
    environment: Mapping[str, str] | None = None
    group: bool = False  # signals go to all its process group: a launcher may not pass them on
    meets: bool = True  # it finds the other nodes itself


def trainer_program(env: Mapping[str, str]) -> Program:
    """finetune_trainer.entrypoint in every rank."""
    return Program((*own_program(), "ranks", "-m", "finetune_trainer.entrypoint"), environment=env)


def own_program() -> tuple[str, ...]:
    """How to start this code once more, with lines that are written when they are said: the file that was dropped into
    a foreign image, or the module."""
    archive = getattr(globals().get("__loader__"), "archive", None)
    return (sys.executable, "-u", *([archive] if archive else ["-m", "finetune_supervisor"]))


def with_flight_recorder(env: Mapping[str, str], node: Node) -> dict[str, str]:
    """torch's record of each rank's last collectives, which NCCL writes when one times out, is kept beside the logs.

    By the names of today and of older versions, which images of users may have; what the user says stays.
    """
    if node.log is None:
        return dict(env)
    file = str(node.log.parent / "collectives-rank-")  # torch adds the rank
    wanted = (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), file),
    )
    ours = {name: value for names, value in wanted if not any(name in env for name in names) for name in names}
    return {**ours, **env}
