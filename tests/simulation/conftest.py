"""Fixture that disables log warnings in simulation tests, because simulated faults cause thousands of them."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def disable_warnings() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
