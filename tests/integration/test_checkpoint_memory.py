"""Tests that no rank holds the whole state of a sharded model for a checkpoint."""

from typing import Any

import pytest

from testing.processes.launches import run_script

pytestmark = pytest.mark.slow

RANKS = 4
MILLIONS_OF_PARAMETERS = 32


@pytest.fixture(scope="module")
def results_by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_script("measure_checkpoints.py", folder, str(MILLIONS_OF_PARAMETERS), ranks=RANKS)


def test_a_rank_copies_and_writes_its_shard_only(results_by_rank: list[dict[str, Any]]) -> None:
    for results in results_by_rank:
        shard_bytes = results["state_bytes"] / RANKS

        assert results["parts"]["copied_bytes"] < 1.1 * shard_bytes
        assert results["parts"]["file_bytes"] == pytest.approx(shard_bytes, rel=0.01)


def test_a_gathered_checkpoint_is_held_by_rank_zero(results_by_rank: list[dict[str, Any]]) -> None:
    """The measurement finds a whole state where there is one."""
    assert results_by_rank[0]["whole"]["copied_bytes"] > 0.95 * results_by_rank[0]["state_bytes"]


def test_a_rank_restores_its_shard_without_reading_the_rest(results_by_rank: list[dict[str, Any]]) -> None:
    for results in results_by_rank:
        assert results["restored_bytes"] < 1.1 * results["state_bytes"] / RANKS
