"""Tests that packs contain every row once and that every epoch has the same number of packs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.packing import PackOrder, pack_best_fit

CAPACITY = 64
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)


def get_packs(order: PackOrder, epoch: int) -> list[tuple[int, ...]]:
    items = order.get_epoch(epoch).items
    return [item for item in items if isinstance(item, tuple)]


@given(lengths=LENGTHS)
def test_every_row_is_in_exactly_one_pack_and_no_pack_exceeds_the_capacity(lengths: list[int]) -> None:
    packed = pack_best_fit(lengths, CAPACITY)

    assert sorted(row for pack in packed for row in pack) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in pack) <= CAPACITY for pack in packed)


@given(lengths=LENGTHS)
def test_no_two_packs_could_be_combined_into_one(lengths: list[int]) -> None:
    sums = sorted(sum(lengths[row] for row in pack) for pack in pack_best_fit(lengths, CAPACITY))

    assert len(sums) < 2 or sums[0] + sums[1] > CAPACITY


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([5, 5], [[0, 1]], id="exactly full"),
        pytest.param([6, 5], [[0], [1]], id="one token over capacity"),
        pytest.param([3, 7, 6, 4], [[1, 0], [2, 3]], id="longest first"),
        pytest.param([8, 7, 2], [[0, 2], [1]], id="fullest pack with enough space"),
        pytest.param([7, 8, 2, 3], [[1, 2], [0, 3]], id="unsorted rows are packed in decreasing order"),
    ],
)
def test_rows_are_packed_with_the_best_fit_decreasing_algorithm(lengths: list[int], expected: list[list[int]]) -> None:
    assert pack_best_fit(lengths, 10) == expected


@given(lengths=LENGTHS, seed=st.integers(0, 5))
def test_every_epoch_contains_every_row_once_in_the_same_number_of_packs(lengths: list[int], seed: int) -> None:
    order = PackOrder(np.array(lengths), max_length=CAPACITY, seed=seed)

    for epoch in range(3):
        packed = get_packs(order, epoch)
        assert len(packed) == len(order)
        assert sorted(row for pack in packed for row in pack) == list(range(len(lengths)))
        assert order.get_epoch(epoch).lengths.tolist() == [sum(lengths[row] for row in pack) for pack in packed]


def test_rows_are_packed_and_shuffled_again_in_every_epoch() -> None:
    order = PackOrder(np.array([10, 40, 50] * 30), max_length=CAPACITY, seed=1)

    first, second = get_packs(order, 0), get_packs(order, 1)

    assert set(first) != set(second), "rows of equal length are swapped"
    assert first == get_packs(order, 0)
    lengths = order.get_epoch(0).lengths
    assert lengths.tolist() != sorted(lengths.tolist(), reverse=True)


def test_utilization_is_the_used_fraction_of_the_pack_capacity() -> None:
    order = PackOrder(np.array([40, 24, 32]), max_length=CAPACITY, seed=1)

    assert len(order) == 2
    assert order.utilization == 0.75


def test_epoch_lengths_are_in_the_same_order_as_the_items() -> None:
    epoch = RowOrder(np.array([10, 11, 12, 13]), seed=1).get_epoch(0)

    assert sorted(map(int, epoch.items)) == [0, 1, 2, 3]  # type: ignore[arg-type]
    assert [int(item) + 10 for item in epoch.items] == epoch.lengths.tolist()  # type: ignore[arg-type]


@given(lengths=LENGTHS, seed=st.integers(0, 5))
def test_no_pack_contains_rows_on_both_sides_of_a_length_limit(lengths: list[int], seed: int) -> None:
    order, limit = (
        PackOrder(np.array(lengths), max_length=CAPACITY, seed=seed, length_limit=CAPACITY // 2),
        CAPACITY // 2,
    )

    for epoch in map(order.get_epoch, range(2)):
        assert len(epoch.items) == len(order)
        assert sorted(row for pack in epoch.items for row in pack) == list(range(len(lengths)))  # type: ignore[union-attr]
        for pack, is_long in zip(epoch.items, epoch.is_long, strict=True):
            assert {lengths[row] > limit for row in pack} == {bool(is_long)}  # type: ignore[union-attr]
