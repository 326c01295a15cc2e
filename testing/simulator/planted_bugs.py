"""Proves that the search finds a bug that a test plants in the operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testing.simulator.search import search

PlantBug = Callable[[pytest.MonkeyPatch], None]
MAX_HISTORIES = 1500  # a bug must be found within this number of histories


def assert_search_finds(plant_bug: PlantBug, kind: str, seed: int) -> None:
    """Assert that a history violates an invariant with the bug, and none without it.

    seed: a seed that finds the bug; after a change of the simulator, the search continues from there.
    """
    with pytest.MonkeyPatch.context() as patch:
        plant_bug(patch)
        counterexample = search(kind, range(seed, seed + MAX_HISTORIES)).counterexample
    assert counterexample is not None
    assert search(kind, (counterexample.seed,)).counterexample is None, "the history violates an invariant anyway"
