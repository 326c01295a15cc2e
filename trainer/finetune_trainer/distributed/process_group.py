"""Initialise and destroy the process group of torch.distributed, which connects all ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist


def init_process_group(device: torch.device, *, timeout_seconds: int) -> None:
    """Initialise the default process group; accelerate would initialise it without the timeout for gloo."""
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def destroy_process_group() -> None:
    """Destroy the default process group if it was initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()
