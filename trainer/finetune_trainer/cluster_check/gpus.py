"""Checks that the device of a rank computes correctly and reports no memory errors."""

import torch

from finetune_trainer.cluster_check.gpu_counters import GpuCounters
from finetune_trainer.errors import GpuHardware

_GPU_SIZE, _CPU_SIZE = 4096, 256  # edge of the multiplied matrices, a power of two
_REPETITIONS = 3


def check_device(device: torch.device, counters: GpuCounters) -> None:
    """Raise GpuHardware if the GPU reports memory errors, or if the device multiplies matrices incorrectly."""
    if counters.uncorrected_errors:
        raise GpuHardware(
            f"{device} reports {counters.uncorrected_errors} uncorrectable memory errors (ECC) since its driver was"
            " loaded; drain the Kubernetes node and reset the GPU"
        )
    if counters.has_failed_remapping:
        raise GpuHardware(f"{device} could not replace defective rows of its memory; replace the GPU")
    for _ in range(_REPETITIONS):
        if wrong := count_wrong_products(device):
            raise GpuHardware(
                f"{device} computes {wrong} elements of a matrix product incorrectly; drain the Kubernetes node and"
                " have the GPU checked"
            )


def count_wrong_products(device: torch.device) -> int:
    """Multiply two matrices with a known product, and return the number of wrong elements.

    The product of a column of -1, 0 and 1 repeated n times and a row repeated n times has elements -n, 0 and n. All
    partial sums are integers, so the result is exact in any order of additions; n is a power of two, which bfloat16
    represents exactly.
    """
    size, dtype = (_GPU_SIZE, torch.bfloat16) if device.type == "cuda" else (_CPU_SIZE, torch.float32)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = torch.float16
    values = torch.arange(size, device=device).remainder(3).sub(1).to(dtype)
    column, row = values.unsqueeze(1), values.flip(0).unsqueeze(0)
    product = column.expand(size, size).contiguous() @ row.expand(size, size).contiguous()
    return int((product != size * column * row).sum())
