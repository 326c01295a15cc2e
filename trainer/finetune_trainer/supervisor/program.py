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


def trainer_program(node: Node, env: Mapping[str, str]) -> Program:
    """Through finetune_trainer.launch, which is torchrun that also writes down the exit codes it saw."""
    module = ("-m", "finetune_trainer.start")
    argv = (sys.executable, "-m", "finetune_trainer.launch", *torchrun_options(node), *module)
    return Program(argv, environment=env)


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
