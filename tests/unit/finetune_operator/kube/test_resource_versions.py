"""Tests of the comparison of resource versions."""

import pytest

from finetune_operator.kube.resource_versions import is_later_version


@pytest.mark.parametrize(
    ("version", "other_version", "is_later"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("zebra", "9", False), ("9", "", False)],
)
def test_versions_are_compared_as_numbers(version: str, other_version: str, is_later: bool) -> None:
    assert is_later_version(version, other_version) is is_later
