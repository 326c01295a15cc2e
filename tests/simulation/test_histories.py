"""Tests that simulated histories violate no invariant under faults of jobs, operators, nodes and the network.

In the histories of a shared cluster, several jobs share one operator with its queue, workers, caches and limits.

`make search HISTORIES=1000000` runs more histories.
"""

import os

import pytest

from testing.simulator.scenarios import GANG_KINDS, QUEUE_KINDS, SCENARIO_KINDS, SHARED_CLUSTER_KINDS, SINGLE_JOB_KINDS
from testing.simulator.search import explain, search

HISTORIES = int(os.environ.get("FINETUNE_HISTORIES", "600"))  # total number over all kinds without queues and gangs
SHARED_CLUSTER_SHARE = 120 / 1000  # of the kinds with several jobs, whose histories take several times as long
QUEUE_SHARE = 54 / 1000  # in addition, of the kinds in which several jobs share a quota of Kueue
GANG_SHARE = 48 / 1000  # in addition, of the kinds in which several gangs share a few Kubernetes nodes
CHUNKS = 6  # chunks per kind, which run in parallel processes


def compute_chunk_size(kind: str) -> int:
    """Return the number of histories of one chunk."""
    shared_kinds = [draw.__name__ for draw in SHARED_CLUSTER_KINDS]
    queue_kinds = [draw.__name__ for draw in QUEUE_KINDS]
    gang_kinds = [draw.__name__ for draw in GANG_KINDS]
    if kind in queue_kinds:
        return round(HISTORIES * QUEUE_SHARE / len(queue_kinds) / CHUNKS)
    if kind in gang_kinds:
        return round(HISTORIES * GANG_SHARE / len(gang_kinds) / CHUNKS)
    if kind in shared_kinds:
        return round(HISTORIES * SHARED_CLUSTER_SHARE / len(shared_kinds) / CHUNKS)
    return -(-round(HISTORIES * (1 - SHARED_CLUSTER_SHARE)) // len(SINGLE_JOB_KINDS) // CHUNKS)


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
    ("two_releases", 114),
    ("poisoned_jobs", 5011),
    ("queued_jobs", 50),
    ("queued_jobs", 86),
    ("queued_jobs", 129),
    ("queue_pauses", 23),
    ("queue_preemptions", 36),
    ("gangs", 95),
    ("gangs", 1096),
    ("gang_upgrades", 138),
)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", SCENARIO_KINDS)
def test_histories_violate_no_invariant(kind: str, chunk: int) -> None:
    size = compute_chunk_size(kind)
    result = search(kind, range(chunk * size, (chunk + 1) * size))

    assert result.counterexample is None, explain(result.counterexample)
    assert result.phases.total() == size > 0


@pytest.mark.parametrize(("kind", "seed"), REGRESSIONS)
def test_past_counterexamples_violate_no_invariant(kind: str, seed: int) -> None:
    result = search(kind, (seed,))

    assert result.counterexample is None, explain(result.counterexample)
