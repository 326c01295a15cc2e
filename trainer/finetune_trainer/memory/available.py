"""Determine the memory available to a rank: its GPU memory, or its share of the container's memory."""

import os
import socket

import torch

from finetune_trainer.cgroup import Cgroup
from finetune_trainer.distributed.collectives import all_gather_numbers, all_gather_objects


def gather_min_rank_memory(device: torch.device) -> int:
    """Return the smallest available memory of all ranks in bytes (collective)."""
    on_gpu = device.type == "cuda"
    local_bytes = (
        torch.cuda.mem_get_info(device)[1] if on_gpu else read_host_memory_limit(Cgroup()) // _count_ranks_on_host()
    )
    return int(min(all_gather_numbers((float(local_bytes),)))[0])


def read_host_memory_limit(cgroup: Cgroup) -> int:
    """Return the memory limit of this container in bytes, at most the physical memory of the host."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup.read_memory_limit()
    return physical_bytes if limit is None else min(limit, physical_bytes)


def _count_ranks_on_host() -> int:
    """Count the ranks with this host name: the ranks of one pod or, in local mode, all ranks of the job."""
    return all_gather_objects(socket.gethostname()).count(socket.gethostname())
