"""Tests of the comparison of resource versions."""

import pytest

from finetune_operator.kube.resource_versions import StateRolledBack, check_version_order, is_later_version


@pytest.mark.parametrize(
    ("version", "other_version", "is_later"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("zebra", "9", False), ("9", "", False)],
)
def test_versions_are_compared_as_numbers(version: str, other_version: str, is_later: bool) -> None:
    assert is_later_version(version, other_version) is is_later


def test_an_older_response_is_reported_with_both_versions_and_the_probable_cause() -> None:
    check_version_order("/pods", known_version="", current_version="5")
    check_version_order("/pods", known_version="5", current_version="5")
    with pytest.raises(
        StateRolledBack, match=r"/pods: .* from resourceVersion 6 to 5, probably because etcd was restored"
    ):
        check_version_order("/pods", known_version="6", current_version="5")
