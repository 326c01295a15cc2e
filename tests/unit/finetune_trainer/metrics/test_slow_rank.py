"""Test the detection of a slow rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.metrics.slow_rank import find_slow_rank


@pytest.mark.parametrize(
    ("own_step_seconds", "expected_rank"),
    [
        pytest.param((1.0, 1.05, 1.0, 1.0), None, id="within 10 percent"),
        pytest.param((1.0, 1.0, 1.3, 1.1), (2, 0.3), id="one of four slow"),
        pytest.param((1.0, 1.2), (1, 0.2), id="one of two slow"),
        pytest.param((1.0,), None, id="one rank"),
        pytest.param((0.0, 0.0), None, id="no time measured"),
    ],
)
def test_rank_is_slow_if_it_exceeds_the_median_by_ten_percent(
    own_step_seconds: tuple[float, ...], expected_rank: tuple[int, float] | None
) -> None:
    slow_rank = find_slow_rank(own_step_seconds)

    assert (slow_rank and (slow_rank.rank, round(slow_rank.excess, 6))) == expected_rank


@given(st.lists(st.floats(min_value=1e-4, max_value=1e4), min_size=1, max_size=64))
def test_slow_rank_is_slower_than_half_of_the_ranks(own_step_seconds: list[float]) -> None:
    slow_rank = find_slow_rank(own_step_seconds)

    half = len(own_step_seconds) / 2
    if slow_rank is not None:
        assert sum(own_step_seconds[slow_rank.rank] > 1.1 * seconds for seconds in own_step_seconds) >= half
