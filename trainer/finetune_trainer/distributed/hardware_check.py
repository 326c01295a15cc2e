"""Check that all ranks have the same hardware and library versions.

Every step takes as long as its slowest rank, and some versions of NCCL cannot communicate with each other.
"""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch

from finetune_trainer.distributed.gpu_requirements import read_driver_version
from finetune_trainer.errors import MixedHardware
from finetune_trainer.units import GIB

_PACKAGES = ("transformers", "accelerate", "peft")


@dataclass(frozen=True)
class RankHardware:
    """Device and library versions of one rank."""

    device: str
    memory_gib: int  # GPU memory; 0 without a GPU
    driver: str
    torch: str
    nccl: str
    packages: str


def describe_rank_hardware(device: torch.device) -> RankHardware:
    """Return the device and library versions of this rank."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    if device.type != "cuda":
        return RankHardware(f"cpu ({platform.machine()})", 0, "", torch.__version__, "", packages)
    properties = torch.cuda.get_device_properties(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    memory_gib = round(properties.total_memory / GIB)
    return RankHardware(properties.name, memory_gib, read_driver_version(), torch.__version__, nccl, packages)


def check_same_hardware(rank_hardware: Sequence[RankHardware], *, ranks_per_node: int) -> None:
    """Raise MixedHardware if a property differs between ranks; the message lists the values by node.

    rank_hardware: one entry per rank, in rank order.
    """
    for name in asdict(rank_hardware[0]):
        ranks_by_value: dict[object, list[int]] = {}
        for rank, hardware in enumerate(rank_hardware):
            ranks_by_value.setdefault(getattr(hardware, name), []).append(rank)
        if len(ranks_by_value) == 1:
            continue
        values = "; ".join(
            f"{value} on {_format_nodes(found, ranks_per_node)}" for value, found in ranks_by_value.items()
        )
        raise MixedHardware(
            f"{name.replace('_', ' ')} differs between ranks: {values}. Choose nodes of one kind"
            " (spec.podTemplate.nodeSelector), or set spec.training.allowMixedHardware"
        )


def _format_nodes(ranks: Sequence[int], ranks_per_node: int) -> str:
    """List ranks by node; omit rank numbers if all ranks of a node are included."""
    parts = []
    for node in sorted({rank // ranks_per_node for rank in ranks}):
        on_node = [rank for rank in ranks if rank // ranks_per_node == node]
        rank_list = "" if len(on_node) == ranks_per_node else f" rank {', '.join(map(str, on_node))}"
        parts.append(f"node {node}{rank_list}")
    return ", ".join(parts)
