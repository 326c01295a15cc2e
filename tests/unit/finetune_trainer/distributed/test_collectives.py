"""Rank numbers from the environment, and the checks of world size and GPUs."""

import pytest
import torch

from finetune_trainer.distributed.collectives import Ranks, check_world_size, choose_device
from finetune_trainer.errors import InvalidSpec, WorldSizeMismatch

RANKS = Ranks(rank=5, local_rank=1, local_world_size=4, world_size=8)


def test_ranks_are_read_from_the_environment_of_torchrun() -> None:
    env = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}

    assert Ranks.from_environment(env) == RANKS
    assert RANKS.nodes == 2
    assert not RANKS.is_first


def test_a_world_size_other_than_planned_is_rejected_with_both_numbers() -> None:
    check_world_size(RANKS, planned=8)
    with pytest.raises(WorldSizeMismatch, match="8 ranks were started, but the job plans 16"):
        check_world_size(RANKS, planned=16)


def test_without_gpus_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert choose_device(RANKS) == torch.device("cpu")


def test_more_ranks_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    with pytest.raises(InvalidSpec, match="nprocPerNode is 4, but the pod has 2 GPUs"):
        choose_device(RANKS)


def test_the_local_rank_is_the_index_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current_devices.append)

    assert choose_device(RANKS) == torch.device("cuda", 1)
    assert current_devices == [1]
