"""Rows in packs: every row once, no pack too full, as many packs in every epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.epoch_order import PackOrder, RowOrder, best_fit

ROOM = 64
LENGTHS = st.lists(st.integers(1, ROOM), min_size=1, max_size=80)


def packs(order: PackOrder, epoch: int) -> list[tuple[int, ...]]:
    items = order.epoch(epoch).items
    return [item for item in items if isinstance(item, tuple)]


@given(lengths=LENGTHS)
def test_every_row_is_in_one_pack_and_no_pack_is_too_full(lengths: list[int]) -> None:
    packed = best_fit(lengths, ROOM)

    assert sorted(row for pack in packed for row in pack) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in pack) <= ROOM for pack in packed)


@given(lengths=LENGTHS)
def test_no_two_packs_would_fit_into_one(lengths: list[int]) -> None:
    sums = sorted(sum(lengths[row] for row in pack) for pack in best_fit(lengths, ROOM))

    assert len(sums) < 2 or sums[0] + sums[1] > ROOM


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([5, 5], [[0, 1]], id="exactly full"),
        pytest.param([6, 5], [[0], [1]], id="one token too many"),
        pytest.param([3, 7, 6, 4], [[1, 0], [2, 3]], id="the longest first"),
        pytest.param([8, 7, 2], [[0, 2], [1]], id="where least room is left, not where there is any"),
        pytest.param([7, 8, 2, 3], [[1, 2], [0, 3]], id="decreasing, though the rows are not"),
    ],
)
def test_rows_go_where_they_fit_best(lengths: list[int], expected: list[list[int]]) -> None:
    assert best_fit(lengths, 10) == expected


@given(lengths=LENGTHS, seed=st.integers(0, 5))
def test_every_epoch_has_as_many_packs_and_every_row_once(lengths: list[int], seed: int) -> None:
    order = PackOrder(np.array(lengths), room=ROOM, seed=seed)

    for epoch in range(3):
        found = packs(order, epoch)
        assert len(found) == len(order)
        assert sorted(row for pack in found for row in pack) == list(range(len(lengths)))
        assert order.epoch(epoch).lengths.tolist() == [sum(lengths[row] for row in pack) for pack in found]


def test_every_epoch_packs_and_shuffles_anew() -> None:
    order = PackOrder(np.array([10, 40, 50] * 30), room=ROOM, seed=1)

    first, second = packs(order, 0), packs(order, 1)

    assert set(first) != set(second), "rows of the same length swap places"
    assert first == packs(order, 0)
    lengths = order.epoch(0).lengths
    assert lengths.tolist() != sorted(lengths.tolist(), reverse=True)


def test_packs_know_how_full_they_are() -> None:
    order = PackOrder(np.array([40, 24, 32]), room=ROOM, seed=1)

    assert len(order) == 2
    assert order.fullness == 0.75


def test_rows_of_an_epoch_come_with_their_lengths() -> None:
    epoch = RowOrder(np.array([10, 11, 12, 13]), seed=1).epoch(0)

    assert sorted(map(int, epoch.items)) == [0, 1, 2, 3]  # type: ignore[arg-type]
    assert [int(item) + 10 for item in epoch.items] == epoch.lengths.tolist()  # type: ignore[arg-type]
