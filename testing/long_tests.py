"""Marks parameters of tests that only `make test-long` runs."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mark_long(values: Iterable[Any], long_values: Sequence[Any], reason: str) -> list[Any]:
    """Mark the parameters of a test that are among the long values; a tuple has one value per argument.

    reason: why `make test` leaves them out.
    """
    arguments = ((value, value if isinstance(value, tuple) else (value,)) for value in values)
    return [
        pytest.param(*each, marks=pytest.mark.long(reason) if value in long_values else ()) for value, each in arguments
    ]
