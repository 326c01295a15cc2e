"""Fixture that tells whether long tests are selected, whose trainings would otherwise run for nothing."""

import pytest


@pytest.fixture(scope="session")
def includes_long_tests(request: pytest.FixtureRequest) -> bool:
    return any(test.get_closest_marker("long") for test in request.session.items)
