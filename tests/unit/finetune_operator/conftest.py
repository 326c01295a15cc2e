"""Fixtures of the operator's tests."""

import pytest

from testing.fakes.http_api import HttpApi


@pytest.fixture
def api() -> HttpApi:
    """Return an in-memory API server without objects."""
    return HttpApi()
