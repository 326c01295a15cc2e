"""Whatever numbers are given, the batch either holds exactly or is refused with numbers that would do."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import AUTO, Batch, BatchError, largest_that_fits, resolve_batch, splits

SIZES = st.integers(min_value=1, max_value=4096)
RANKS = st.integers(min_value=1, max_value=512)
GIVEN = st.none() | SIZES


@given(per_device=GIVEN, accumulation=GIVEN, effective=GIVEN, world_size=RANKS)
def test_what_is_given_is_kept_and_what_is_asked_for_is_met(
    per_device: int | None, accumulation: int | None, effective: int | None, world_size: int
) -> None:
    try:
        batch = resolve_batch(
            per_device=per_device, accumulation=accumulation, effective=effective, world_size=world_size
        )
    except BatchError:
        assert effective is not None
        return
    assert batch.world_size == world_size
    assert per_device in (None, batch.per_device)
    assert accumulation in (None, batch.accumulation)
    assert effective in (None, batch.effective)
    assert batch.effective == batch.per_device * batch.accumulation * batch.world_size


@given(per_device=SIZES, accumulation=SIZES, world_size=RANKS)
def test_any_two_of_the_three_give_the_third(per_device: int, accumulation: int, world_size: int) -> None:
    effective = per_device * accumulation * world_size

    whole = resolve_batch(per_device=per_device, accumulation=accumulation, effective=None, world_size=world_size)
    by_size = resolve_batch(per_device=per_device, accumulation=None, effective=effective, world_size=world_size)
    by_steps = resolve_batch(per_device=None, accumulation=accumulation, effective=effective, world_size=world_size)

    assert whole == by_size == by_steps


@given(per_device=GIVEN, effective=SIZES, world_size=RANKS)
def test_a_refusal_names_numbers_that_are_accepted(per_device: int | None, effective: int, world_size: int) -> None:
    try:
        resolve_batch(per_device=per_device, accumulation=None, effective=effective, world_size=world_size)
    except BatchError as refused:
        proposed = re.findall(r"\d+", str(refused).split("the nearest that fit: ")[1])
        assert proposed
        for number in proposed:
            accepted = resolve_batch(
                per_device=per_device, accumulation=None, effective=int(number), world_size=world_size
            )
            assert accepted.effective == int(number)
    else:
        assert effective % ((per_device or 1) * world_size) == 0


def test_a_contradiction_is_told_with_its_product() -> None:
    with pytest.raises(BatchError, match=r"globalBatchSize is 64, but .* = 2 x 4 x 4 = 32; leave one of them out"):
        resolve_batch(per_device=2, accumulation=4, effective=64, world_size=4)


@pytest.mark.parametrize(
    ("nodes", "processes", "accumulation"),
    [pytest.param(2, 1, 8, id="2x1x8"), pytest.param(2, 4, 2, id="2x4x2"), pytest.param(1, 16, 1, id="1x16x1")],
)
def test_the_same_effective_batch_on_other_layouts(nodes: int, processes: int, accumulation: int) -> None:
    batch = resolve_batch(per_device=None, accumulation=None, effective=16, world_size=nodes * processes)

    assert (batch.per_device, batch.accumulation, batch.effective) == (1, accumulation, 16)


@given(effective=st.integers(1, 100_000), world_size=RANKS)
def test_the_splits_of_a_batch_are_all_there_are_and_fall(effective: int, world_size: int) -> None:
    smallest = Batch(1, effective, world_size)

    found = splits(smallest)

    assert {batch.effective for batch in found} == {smallest.effective}
    assert {batch.world_size for batch in found} == {world_size}
    assert [batch.per_device for batch in found] == [n for n in range(effective, 0, -1) if effective % n == 0]


@given(samples=st.integers(1, 100_000), room=st.integers(0, 100_000))
def test_the_largest_split_that_fits_is_found_with_few_trials(samples: int, room: int) -> None:
    tried = []

    def fits(batch: Batch) -> bool:
        tried.append(batch)
        return batch.per_device <= room

    found = largest_that_fits(splits(Batch(1, samples, 4)), fits)

    fitting = [size for size in range(1, min(samples, room) + 1) if samples % size == 0]
    assert (found.per_device if found else None) == max(fitting, default=None)
    assert len(tried) <= 8  # of the 128 that a number below 100000 can have


@given(effective=st.integers(1, 4096), world_size=RANKS)
def test_auto_is_one_sample_at_a_time_until_more_are_known_to_fit(effective: int, world_size: int) -> None:
    found = resolve_batch(per_device=AUTO, accumulation=None, effective=effective * world_size, world_size=world_size)

    assert found == Batch(1, effective, world_size)


def test_auto_needs_ranks_that_divide_the_effective_batch() -> None:
    with pytest.raises(BatchError, match=r"globalBatchSize 7 .* the nearest that fit: 4 or 8"):
        resolve_batch(per_device=AUTO, accumulation=None, effective=7, world_size=4)
