"""Test that each rank chooses its GPU, or the CPU if there are no GPUs."""

from pathlib import Path

import pytest
import torch

from finetune_trainer.distributed.devices import choose_device, describe_torch_build
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import DriverMismatch, InvalidSpec, TrainerError

RANKS = Ranks(rank=5, local_rank=1, local_world_size=4, world_size=8)
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


def set_gpus(
    monkeypatch: pytest.MonkeyPatch, *, count: int, capability: tuple[int, int] = (9, 0), cuda: str = "13.0"
) -> list[int]:
    """Replace torch's GPUs, and return the list of devices that become the current one."""
    current_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current_devices.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return current_devices


@pytest.mark.skipif(HAS_GPU, reason="this host has a GPU")
def test_device_is_cpu_without_gpus() -> None:
    assert choose_device(RANKS) == torch.device("cpu")


@pytest.mark.skipif(HAS_GPU, reason="this host has a GPU")
def test_ranks_do_not_train_on_the_cpu_if_the_limits_contain_gpus() -> None:
    with pytest.raises(TrainerError, match="the limits of the pod contain 4 GPUs, but torch"):
        choose_device(RANKS, planned_gpus=4)


@pytest.mark.skipif(HAS_GPU, reason="this host has a GPU")
def test_ranks_do_not_train_on_the_cpu_if_the_limits_contain_gpus_of_another_vendor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidSpec, match=r"the limits of the pod contain amd.com/gpu, but torch .* is built for"):
        choose_device(RANKS, other_gpus="amd.com/gpu")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(RANKS, other_gpus="amd.com/gpu") == torch.device("cpu")


def test_more_ranks_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, count=2)

    with pytest.raises(InvalidSpec, match="nprocPerNode is 4, but the pod has 2 GPUs"):
        choose_device(RANKS)


def test_local_rank_is_the_gpu_index(monkeypatch: pytest.MonkeyPatch) -> None:
    current_devices = set_gpus(monkeypatch, count=4)

    assert choose_device(RANKS) == torch.device("cuda", 1)
    assert current_devices == [1]


def test_gpu_without_code_in_torch_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, count=4, capability=(7, 0))

    with pytest.raises(DriverMismatch, match=r"does not support Tesla V100-SXM2-32GB \(compute capability 7\.0"):
        choose_device(RANKS)


def test_build_of_torch_is_described_as_torch_reports_it() -> None:
    build = describe_torch_build()

    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)
    assert build.architectures == tuple(torch.cuda.get_arch_list())
