"""Test how pairs of nodes are scheduled."""

import itertools

import pytest

from finetune_trainer.cluster_check.network import schedule_pairs


@pytest.mark.parametrize("node_count", [2, 3, 4, 7, 16])
def test_every_pair_of_nodes_is_measured_once_and_no_node_twice_at_the_same_time(node_count: int) -> None:
    rounds = list(schedule_pairs(node_count))

    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == list(itertools.combinations(range(node_count), 2))
    for concurrent in rounds:
        nodes = [node for pair in concurrent for node in pair]
        assert len(set(nodes)) == len(nodes)
