"""Fixture that prepares each process for thousands of histories."""

import logging
from collections.abc import Iterator

import pytest

from testing.simulator.search import reduce_garbage_collection


@pytest.fixture(autouse=True, scope="session")
def prepare_process() -> Iterator[None]:
    """Disable log warnings, because simulated faults cause thousands of them, and collect garbage less often."""
    reduce_garbage_collection()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
