"""Ranks that do not compute alike: every step takes as long as the slowest, and some versions do not talk at all."""

import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from finetune_trainer.errors import MixedHardware
from finetune_trainer.memory.gpus import GIB

_DRIVER = Path("/proc/driver/nvidia/version")  # of the kernel, whatever the image holds
_PACKAGES = ("transformers", "accelerate", "peft")


@dataclass(frozen=True)
class Computes:
    """With what a rank computes."""

    device: str
    memory_gib: int  # of the GPU; 0 without one
    driver: str
    torch: str
    nccl: str
    packages: str


def describe_rank(device: torch.device) -> Computes:
    """This one."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    if device.type != "cuda":
        return Computes(f"cpu ({platform.machine()})", 0, "", torch.__version__, "", packages)
    found = torch.cuda.get_device_properties(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    memory = round(found.total_memory / GIB)
    return Computes(found.name, memory, _driver_version(), torch.__version__, nccl, packages)


def check_alike(ranks: Sequence[Computes], *, per_node: int) -> None:
    """Raises MixedHardware, naming what differs and where; `ranks` in their order."""
    for what in asdict(ranks[0]):
        found: dict[object, list[int]] = {}
        for rank, computes in enumerate(ranks):
            found.setdefault(getattr(computes, what), []).append(rank)
        if len(found) == 1:
            continue
        told = "; ".join(f"{value} on {_nodes(each, per_node)}" for value, each in found.items())
        raise MixedHardware(
            f"{what.replace('_', ' ')} differs between ranks: {told}. Choose machines of one kind"
            " (spec.podTemplate.nodeSelector), or set spec.training.allowMixedHardware"
        )


def _nodes(ranks: Sequence[int], per_node: int) -> str:
    """By node where all of its ranks are meant."""
    told = []
    for node in sorted({rank // per_node for rank in ranks}):
        inside = [rank for rank in ranks if rank // per_node == node]
        which = "" if len(inside) == per_node else f" rank {', '.join(map(str, inside))}"
        told.append(f"node {node}{which}")
    return ", ".join(told)


def _driver_version() -> str:
    try:
        found = re.search(r"\d+\.\d+(?:\.\d+)?", _DRIVER.read_text())
    except OSError:  # another vendor's GPU, or a runtime that hides it
        return ""
    return found[0] if found else ""
