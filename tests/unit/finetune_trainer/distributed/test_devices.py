"""Test that each rank chooses its GPU, or the CPU if there are no GPUs."""

import pytest
import torch

from finetune_trainer.distributed.devices import choose_device
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import InvalidSpec

RANKS = Ranks(rank=5, local_rank=1, local_world_size=4, world_size=8)


def test_device_is_cpu_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert choose_device(RANKS) == torch.device("cpu")


def test_more_ranks_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    with pytest.raises(InvalidSpec, match="nprocPerNode is 4, but the pod has 2 GPUs"):
        choose_device(RANKS)


def test_local_rank_is_the_gpu_index(monkeypatch: pytest.MonkeyPatch) -> None:
    current_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current_devices.append)

    assert choose_device(RANKS) == torch.device("cuda", 1)
    assert current_devices == [1]
