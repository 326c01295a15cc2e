"""Tests of reading ownership and timestamps of child objects."""

import pytest

from finetune_operator.observation.ownership import parse_time


@pytest.mark.parametrize("text", [None, "", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_missing_and_out_of_range_timestamps_are_none(text: str | None) -> None:
    assert parse_time(text) is None
