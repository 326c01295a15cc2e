"""Measure the network between four ranks that act as two nodes: `measure_network.py RESULTS [RANK_WITH_FAULT]`.

Each rank writes what it measured, or its error, to the folder RESULTS.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finetune_trainer.cluster_check.network import check_sum, measure_network
from finetune_trainer.distributed.process_group import destroy_process_group, init_process_group
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import NetworkFault

RANKS_PER_NODE = 2


def corrupt_received_data() -> None:
    """Let every all-reduce return one wrong element on this rank."""
    all_reduce = dist.all_reduce

    def all_reduce_with_a_fault(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        all_reduce(tensor, *arguments, **keywords)
        tensor[5] += 1

    dist.all_reduce = all_reduce_with_a_fault


def main(folder: Path, *, rank_with_fault: int | None) -> None:
    device, started = torch.device("cpu"), Ranks.from_environment(os.environ)
    init_process_group(device, timeout_seconds=60)
    ranks = Ranks(started.rank, started.rank % RANKS_PER_NODE, RANKS_PER_NODE, started.world_size)
    if ranks.rank == rank_with_fault:
        corrupt_received_data()
    try:
        if rank_with_fault is None:
            bandwidth = measure_network(ranks, device)
            assert bandwidth is not None
            result = asdict(bandwidth)
        else:
            check_sum(ranks, device)
            result = {}
    except NetworkFault as error:
        result = {"error": str(error)}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), rank_with_fault=int(sys.argv[2]) if len(sys.argv) > 2 else None)
