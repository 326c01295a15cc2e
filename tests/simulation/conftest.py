"""Troubles are the subject here, and the operator warns of each: thousands of lines that nobody reads."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def only_errors() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
