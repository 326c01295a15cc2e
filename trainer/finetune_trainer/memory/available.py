"""Determine the memory available to a rank: its GPU memory, or its share of the container's memory."""

import os
import socket
from pathlib import Path

import torch

from finetune_trainer.distributed.collectives import all_gather_numbers, all_gather_objects

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP_FILE = Path("/proc/self/cgroup")


def gather_min_rank_memory(device: torch.device) -> int:
    """Return the smallest available memory of all ranks in bytes (collective)."""
    on_gpu = device.type == "cuda"
    local_bytes = torch.cuda.mem_get_info(device)[1] if on_gpu else read_host_memory_limit() // _count_ranks_on_host()
    return int(min(all_gather_numbers((float(local_bytes),)))[0])


def read_host_memory_limit(cgroup_root: Path = _CGROUP_ROOT, membership_file: Path = _MEMBERSHIP_FILE) -> int:
    """Return the lowest cgroup v2 limit of this container in bytes, at most the physical memory of the host."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own_cgroup = cgroup_root / _read_cgroup_path(membership_file).lstrip("/")
    ancestors = [folder for folder in (own_cgroup, *own_cgroup.parents) if folder.is_relative_to(cgroup_root)]
    limits = [limit for folder in ancestors if (limit := _read_limit(folder / "memory.max")) is not None]
    return min([*limits, physical_bytes])


def _read_cgroup_path(membership_file: Path) -> str:
    """Return the cgroup v2 path from the line that starts with `0::`; inside a container the path is the root."""
    try:
        lines = membership_file.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _read_limit(limit_file: Path) -> int | None:
    try:
        content = limit_file.read_text(encoding="utf-8").strip()
    except OSError:  # the root cgroup has no such file
        return None
    return int(content) if content.isdigit() else None  # `max` means unlimited


def _count_ranks_on_host() -> int:
    """Count the ranks with this host name: the ranks of one pod or, in local mode, all ranks of the job."""
    return all_gather_objects(socket.gethostname()).count(socket.gethostname())
