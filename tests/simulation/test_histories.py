"""Whatever happens to a job, its operator, its nodes and the way between them: what holds in every history.

`make search HISTORIES=1000000` looks at more of them.
"""

import os

import pytest

from testing.simulator.scenarios import KINDS
from testing.simulator.search import explain, search

HISTORIES = int(os.environ.get("FINETUNE_HISTORIES", "10500"))  # of all kinds together
PIECES = 6  # of each kind, so that several processes have something to do
SIZE = -(-HISTORIES // len(KINDS) // PIECES)

# by `make search`: what they broke is mended
FOUND = (
    ("hard_times", 5000110),
    ("lost_machines", 20002101),
    ("hard_times", 40018838),
    ("anything", 50004295),
    ("anything", 60005855),
    ("anything", 70010963),
    ("anything", 70011411),
    ("lost_machines", 70012257),
    ("meddling", 172011874),
    ("meddling", 173009407),
    ("meddling", 175004807),
    ("stale_caches", 176007384),
)


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("kind", KINDS)
def test_every_promise_is_kept(kind: str, piece: int) -> None:
    found = search(kind, range(piece * SIZE, (piece + 1) * SIZE))

    assert found.finding is None, explain(found.finding)
    assert found.phases.total() == SIZE


@pytest.mark.parametrize(("kind", "seed"), FOUND)
def test_what_was_found_once_stays_mended(kind: str, seed: int) -> None:
    found = search(kind, (seed,))

    assert found.finding is None, explain(found.finding)
