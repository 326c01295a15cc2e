"""Initialise and destroy the process group of torch.distributed, which connects all ranks."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

# `make gpu-check` sets it to gloo to run several ranks on one GPU, which NCCL does not support.
_CUDA_BACKEND_VARIABLE = "FINETUNE_TEST_CUDA_BACKEND"
_NCCL, _GLOO = "nccl", "gloo"


def get_device_backend(device: torch.device) -> str:
    """Return the backend of collectives on tensors of this device: nccl for a GPU, gloo for the CPU."""
    return os.environ.get(_CUDA_BACKEND_VARIABLE, _NCCL) if device.type == "cuda" else _GLOO


def shares_gpus() -> bool:
    """Return whether several ranks may use the same GPU, as in a test."""
    return os.environ.get(_CUDA_BACKEND_VARIABLE) == _GLOO


def init_process_group(device: torch.device, *, timeout_seconds: int) -> None:
    """Initialise the default process group; accelerate would initialise it without the timeout for gloo.

    On a GPU it has two backends: tensors in host memory, such as Python objects and the offloaded shards of FSDP2, are
    exchanged by gloo.
    """
    if dist.is_initialized():
        return
    timeout, backend = timedelta(seconds=timeout_seconds), get_device_backend(device)
    if device.type == "cuda":
        device_id = device if backend == _NCCL else None
        dist.init_process_group(f"cpu:{_GLOO},cuda:{backend}", timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(backend, timeout=timeout)


def destroy_process_group() -> None:
    """Destroy the default process group if it was initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()
