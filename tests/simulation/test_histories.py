"""Tests that simulated histories violate no invariant under faults of jobs, operators, nodes and the network.

`make search HISTORIES=1000000` runs more histories.
"""

import os

import pytest

from testing.simulator.scenarios import SCENARIO_KINDS
from testing.simulator.search import explain, search

HISTORIES = int(os.environ.get("FINETUNE_HISTORIES", "10500"))  # total number over all kinds of histories
CHUNKS = 6  # chunks per kind, which run in parallel processes
CHUNK_SIZE = -(-HISTORIES // len(SCENARIO_KINDS) // CHUNKS)

# kinds and seeds of histories that once violated an invariant in `make search`
REGRESSIONS = (
    ("resource_faults", 5000110),
    ("lost_k8s_nodes", 20002101),
    ("resource_faults", 40018838),
    ("all_faults", 50004295),
    ("all_faults", 60005855),
    ("all_faults", 70010963),
    ("all_faults", 70011411),
    ("lost_k8s_nodes", 70012257),
    ("user_interference", 172011874),
    ("user_interference", 173009407),
    ("user_interference", 175004807),
    ("stale_caches", 176007384),
)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", SCENARIO_KINDS)
def test_histories_violate_no_invariant(kind: str, chunk: int) -> None:
    result = search(kind, range(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE))

    assert result.counterexample is None, explain(result.counterexample)
    assert result.phases.total() == CHUNK_SIZE


@pytest.mark.parametrize(("kind", "seed"), REGRESSIONS)
def test_past_counterexamples_violate_no_invariant(kind: str, seed: int) -> None:
    result = search(kind, (seed,))

    assert result.counterexample is None, explain(result.counterexample)
