"""How much memory there is: of the rank's GPU, or of the container that it shares with other ranks."""

import os
import socket
from pathlib import Path

import torch

from finetune_trainer.distributed.collectives import gather, gather_numbers

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_of_a_rank(device: torch.device) -> int:
    """Bytes, of the rank that has the least; every rank has to ask."""
    on_gpu = device.type == "cuda"
    mine = torch.cuda.mem_get_info(device)[1] if on_gpu else host_memory() // _ranks_of_this_host()
    return int(min(gather_numbers((float(mine),), device))[0])


def host_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """What all processes of this container may hold: the tightest limit of cgroup v2, or what the machine has."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = cgroups / _path_in(membership).lstrip("/")
    above = [folder for folder in (own, *own.parents) if folder.is_relative_to(cgroups)]
    limits = [limit for folder in above if (limit := _limit(folder / "memory.max")) is not None]
    return min([*limits, machine])


def _path_in(membership: Path) -> str:
    """Of cgroup v2, whose line begins with `0::`; in a container that is its root."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _limit(file: Path) -> int | None:
    try:
        said = file.read_text(encoding="utf-8").strip()
    except OSError:  # the root has none
        return None
    return int(said) if said.isdigit() else None  # else `max`


def _ranks_of_this_host() -> int:
    """A pod has a name of its own; in local mode the nodes of a job share one machine."""
    return gather(socket.gethostname()).count(socket.gethostname())
