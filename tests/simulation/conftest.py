"""Fixtures of the simulation tests: warnings are disabled, because the simulated faults cause thousands."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def log_errors_only() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
