"""Memory available to a rank: of its GPU, or of the container that it shares with other ranks."""

import os
import socket
from pathlib import Path

import torch

from finetune_trainer.distributed.collectives import all_gather_numbers, all_gather_objects

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def rank_memory_bytes(device: torch.device) -> int:
    """Return the memory of the rank that has the least, in bytes. This is a collective: every rank must call it."""
    on_gpu = device.type == "cuda"
    local_bytes = torch.cuda.mem_get_info(device)[1] if on_gpu else host_memory_bytes() // _count_ranks_of_host()
    return int(min(all_gather_numbers((float(local_bytes),), device))[0])


def host_memory_bytes(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the tightest cgroup v2 limit of this container, or the physical memory of the host."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = cgroups / _read_cgroup_path(membership).lstrip("/")
    ancestors = [folder for folder in (own, *own.parents) if folder.is_relative_to(cgroups)]
    limits = [limit for folder in ancestors if (limit := _read_limit(folder / "memory.max")) is not None]
    return min([*limits, physical_bytes])


def _read_cgroup_path(membership: Path) -> str:
    """Return the cgroup v2 path, which is on the line that starts with `0::`; inside a container it is the root."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _read_limit(file: Path) -> int | None:
    try:
        content = file.read_text(encoding="utf-8").strip()
    except OSError:  # the root cgroup has no such file
        return None
    return int(content) if content.isdigit() else None  # `max` means unlimited


def _count_ranks_of_host() -> int:
    """Count ranks by host name: a pod has its own, and in local mode all nodes of a job run on one host."""
    return all_gather_objects(socket.gethostname()).count(socket.gethostname())
