"""Test that rank numbers are read from the environment and that the world size is checked."""

import pytest

from finetune_trainer.distributed.rank_context import Ranks, check_world_size
from finetune_trainer.errors import WorldSizeMismatch

RANKS = Ranks(rank=5, local_rank=1, local_world_size=4, world_size=8)


def test_ranks_are_read_from_the_torchrun_environment() -> None:
    env = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}

    assert Ranks.from_environment(env) == RANKS
    assert RANKS.node_count == 2
    assert not RANKS.is_rank_zero


def test_unplanned_world_size_is_rejected() -> None:
    check_world_size(RANKS, planned_world_size=8)
    with pytest.raises(WorldSizeMismatch, match="8 ranks were started, but the job plans 16"):
        check_world_size(RANKS, planned_world_size=16)
