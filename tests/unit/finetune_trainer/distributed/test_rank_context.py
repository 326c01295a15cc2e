"""Rank numbers from the environment, and the check of the world size."""

import pytest

from finetune_trainer.distributed.rank_context import Ranks, check_world_size
from finetune_trainer.errors import WorldSizeMismatch

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
