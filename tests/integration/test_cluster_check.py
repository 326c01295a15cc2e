"""Test the measurement of the network between real processes."""

from pathlib import Path
from typing import Any

import pytest

from testing.processes.launches import run_script

pytestmark = pytest.mark.slow

RANKS = 4


def run_ranks(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the result of each of four ranks on two nodes."""
    return run_script("measure_network.py", folder, *arguments, ranks=RANKS)


def test_bandwidth_is_measured_over_all_ranks_within_nodes_and_between_nodes(tmp_path: Path) -> None:
    results = run_ranks(tmp_path)

    assert all(result == results[0] for result in results), "all ranks have the same figures"
    assert results[0]["all_reduce_gbps"] > 0.01
    assert results[0]["intra_node_gbps"] > 0.01
    assert [pair["nodes"] for pair in results[0]["pairs"]] == ["0-1"]
    assert results[0]["pairs"][0]["gbps"] > 0.01


def test_only_the_rank_that_receives_wrong_data_reports_a_fault(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, "2")

    assert [result.get("error", "") for result in results] == [
        "",
        "",
        "rank 2 received 1 wrong elements of an all-reduce over 4 ranks; have the network adapters and the NVLink"
        " connections of its Kubernetes node checked",
        "",
    ]
