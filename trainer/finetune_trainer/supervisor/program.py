"""What the supervisor starts and watches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .contract import Node


@dataclass(frozen=True)
class Program:
    """A child to be: its words, its folder and its environment, where they are not our own."""

    argv: tuple[str, ...]
    folder: Path | None = None
    environment: Mapping[str, str] | None = None
    group: bool = False  # signals go to all its process group: a launcher may not pass them on


def trainer_program(node: Node) -> Program:
    """Through finetune_trainer.launch, which is torchrun that also writes down the exit codes it saw."""
    module = ("-m", "finetune_trainer.start")
    return Program((sys.executable, "-m", "finetune_trainer.launch", *torchrun_options(node), *module))


def torchrun_options(node: Node) -> tuple[str, ...]:
    """With underscores, which every torchrun takes."""
    return (
        f"--nnodes={node.nodes}",
        f"--node_rank={node.node_rank}",
        f"--nproc_per_node={node.ranks_per_node}",
        f"--master_addr={node.master_addr}",
        f"--master_port={node.master_port}",
        "--max_restarts=0",  # restarts are the operator's: all nodes together
        f"--log_dir={node.run.torchrun}",
    )
