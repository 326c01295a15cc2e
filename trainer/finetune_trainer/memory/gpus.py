"""Table of the GPU memory that torch can use, which is less than the nominal memory of a GPU."""

from finetune_trainer.units import GIB

# GiB reported by `torch.cuda.mem_get_info` on an idle GPU, rounded down; with ECC where it cannot be disabled.
_USABLE_GIB = {
    "t4-16g": 14.5,
    "v100-16g": 15.7,
    "v100-32g": 31.7,
    "rtx3090-24g": 23.6,
    "rtx4090-24g": 23.5,
    "rtx5090-32g": 31.3,
    "a10-24g": 22.0,
    "l4-24g": 21.9,
    "a6000-48g": 47.4,
    "l40s-48g": 44.3,
    "a100-40g": 39.3,
    "a100-80g": 79.1,
    "h100-80g": 79.1,
    "h200-141g": 139.7,
    "b200-192g": 178.3,
}
USABLE_BYTES = {name: int(gib * GIB) for name, gib in _USABLE_GIB.items()}


def find_fitting_gpus(needed_bytes: int) -> tuple[str, ...]:
    """Return the names of all GPUs with at least `needed_bytes` of usable memory, smallest first."""
    fitting_gpus = ((usable_bytes, name) for name, usable_bytes in USABLE_BYTES.items() if usable_bytes >= needed_bytes)
    return tuple(name for _, name in sorted(fitting_gpus))
