"""Settings of all suites: property tests have no time limit per example, because CI machines differ in speed."""

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Reject a test that `make test` leaves out without a reason."""
    for marker in item.iter_markers("long"):
        if [type(reason) for reason in marker.args] != [str]:
            raise pytest.UsageError(f"{item.nodeid}: state in one line why `make test` leaves it out: long(reason)")
