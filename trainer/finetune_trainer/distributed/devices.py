"""Choose the device of a rank: a GPU, or the CPU if there are no GPUs."""

import os

import torch

from finetune_trainer.distributed.gpu_requirements import (
    Card,
    TorchBuild,
    check_architecture,
    explain_missing_gpus,
    explain_missing_other_gpus,
    find_expected_gpus,
    hides_gpus,
    is_too_old,
    read_driver_version,
)
from finetune_trainer.distributed.process_group import shares_gpus
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import DriverMismatch, InvalidSpec


def choose_device(ranks: Ranks, *, planned_gpus: int = 0, other_gpus: str = "") -> torch.device:
    """Return the GPU of this rank and make it the current device; return the CPU if there are no GPUs.

    planned_gpus: NVIDIA GPUs in the limits of the pod. other_gpus: resource of the GPUs of another vendor there.

    Raises InvalidSpec if there are more ranks than GPUs, and DriverMismatch or GpuUnavailable if torch cannot use them.
    """
    if not torch.cuda.is_available():
        if expectation := find_expected_gpus(os.environ, planned_gpus=planned_gpus):
            raise explain_missing_gpus(expectation, describe_torch_build(), driver=read_driver_version())
        if other_gpus and not hides_gpus(os.environ):
            raise explain_missing_other_gpus(other_gpus, describe_torch_build(), rocm=torch.version.hip)
        return torch.device("cpu")
    if ranks.local_world_size > torch.cuda.device_count() and not shares_gpus():
        raise InvalidSpec(
            f"spec.nprocPerNode is {ranks.local_world_size}, but the pod has {torch.cuda.device_count()} GPUs;"
            " each rank needs one: lower nprocPerNode or raise resources.limits"
        )
    index = ranks.local_rank % torch.cuda.device_count() if shares_gpus() else ranks.local_rank
    _use_gpu(index)
    return torch.device("cuda", index)


def _use_gpu(index: int) -> None:
    """Make the GPU the current device, which initialises CUDA. Raises DriverMismatch."""
    build, driver = describe_torch_build(), read_driver_version()
    try:
        torch.cuda.set_device(index)
    except RuntimeError as error:  # torch.cuda.is_available asks NVML only, which works with every driver
        if is_too_old(driver, build):
            raise DriverMismatch(f"the NVIDIA driver {driver} is too old: {build.requirement}") from error
        raise
    if build.cuda is not None:  # other vendors have other architectures
        card = Card(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        check_architecture(card, build, driver=driver)


def describe_torch_build() -> TorchBuild:
    """Return the versions of torch and of its CUDA, and the GPU architectures for which it contains code."""
    return TorchBuild(torch.__version__, torch.version.cuda, tuple(torch.cuda.get_arch_list()))


def get_device_name(device: torch.device) -> str:
    """Return the model name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
