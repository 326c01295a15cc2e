"""Limit of threads, and fixture with which trainings of long tests run only if these tests are selected."""

import os

import pytest

# Set before torch is imported: threads of several processes on the same cores wait for each other in busy loops.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def includes_long_tests(request: pytest.FixtureRequest) -> bool:
    return any(test.get_closest_marker("long") for test in request.session.items)
