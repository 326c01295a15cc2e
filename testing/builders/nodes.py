"""Builder of a supervisor's Node, which production code parses from the environment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune_supervisor.contract import Node, RunFolder


def node(folder: Path, **fields: Any) -> Node:
    """Return node 0 of a job of two nodes with two ranks each; all its files are below `folder`."""
    base = Node(
        namespace="default",
        job="bert",
        uid="ours",
        attempt=1,
        node_rank=0,
        num_nodes=2,
        ranks_per_node=2,
        world_size=4,
        master_addr="127.0.0.1",
        master_port=29500,
        output=folder,
        run_folder=RunFolder(folder),
        termination_log=folder / "termination-log",
        status_port=0,
        grace_seconds=60,
        hang_seconds=0,
    )
    return replace(base, **fields)
