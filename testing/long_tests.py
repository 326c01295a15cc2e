"""Marks parameters of tests that take long and resemble those of other tests; `make test-long` runs the tests."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mark_long(values: Iterable[Any], long_values: Sequence[Any]) -> list[Any]:
    """Mark the parameters of a test that are among the long values; a tuple has one value per argument."""
    arguments = ((value, value if isinstance(value, tuple) else (value,)) for value in values)
    return [pytest.param(*each, marks=pytest.mark.long if value in long_values else ()) for value, each in arguments]
