"""Fixture with which trainings of long tests run only if these tests are selected."""

import pytest


@pytest.fixture(scope="session")
def includes_long_tests(request: pytest.FixtureRequest) -> bool:
    return any(test.get_closest_marker("long") for test in request.session.items)
