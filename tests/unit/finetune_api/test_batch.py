"""Tests of batch sizes: the effective batch is exact, or an error suggests valid sizes."""

import re
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import AUTO, Batch, BatchError, find_largest_fitting_batch, list_batch_splits, resolve_batch

SIZES = st.integers(min_value=1, max_value=4096)
RANKS = st.integers(min_value=1, max_value=512)
OPTIONAL_SIZES = st.none() | SIZES


def resolve(
    micro_batch_size: int | Literal["auto"] | None, accumulation: int | None, effective: int | None, *, ranks: int
) -> Batch:
    """Return the batch for these sizes, of which None has to be derived."""
    return resolve_batch(
        micro_batch_size=micro_batch_size, accumulation_steps=accumulation, effective_batch=effective, world_size=ranks
    )


@given(
    micro_batch_size=OPTIONAL_SIZES, accumulation_steps=OPTIONAL_SIZES, effective_batch=OPTIONAL_SIZES, world_size=RANKS
)
def test_given_sizes_are_kept_and_effective_batch_is_exact(
    micro_batch_size: int | None, accumulation_steps: int | None, effective_batch: int | None, world_size: int
) -> None:
    try:
        batch = resolve(micro_batch_size, accumulation_steps, effective_batch, ranks=world_size)
    except BatchError:
        assert effective_batch is not None
        return
    assert batch.world_size == world_size
    assert micro_batch_size in (None, batch.micro_batch_size)
    assert accumulation_steps in (None, batch.accumulation_steps)
    assert effective_batch in (None, batch.effective)
    assert batch.effective == batch.micro_batch_size * batch.accumulation_steps * batch.world_size


@given(micro_batch_size=SIZES, accumulation_steps=SIZES, world_size=RANKS)
def test_third_size_is_derived_from_the_other_two(
    micro_batch_size: int, accumulation_steps: int, world_size: int
) -> None:
    effective_batch = micro_batch_size * accumulation_steps * world_size

    from_factors = resolve(micro_batch_size, accumulation_steps, None, ranks=world_size)
    from_micro_batch = resolve(micro_batch_size, None, effective_batch, ranks=world_size)
    from_accumulation = resolve(None, accumulation_steps, effective_batch, ranks=world_size)

    assert from_factors == from_micro_batch == from_accumulation


@given(micro_batch_size=OPTIONAL_SIZES, effective_batch=SIZES, world_size=RANKS)
def test_error_contains_valid_values(micro_batch_size: int | None, effective_batch: int, world_size: int) -> None:
    try:
        resolve(micro_batch_size, None, effective_batch, ranks=world_size)
    except BatchError as error:
        proposed_sizes = re.findall(r"\d+", str(error).split("the nearest multiples: ")[1])
        assert proposed_sizes
        for number in proposed_sizes:
            accepted_batch = resolve(micro_batch_size, None, int(number), ranks=world_size)
            assert accepted_batch.effective == int(number)
    else:
        assert effective_batch % ((micro_batch_size or 1) * world_size) == 0


def test_inconsistent_sizes_are_reported_with_their_product() -> None:
    with pytest.raises(BatchError, match=r"globalBatchSize is 64, but .* = 2 x 4 x 4 = 32; remove one of them"):
        resolve(2, 4, 64, ranks=4)


@given(effective_batch=st.integers(1, 100_000), world_size=RANKS)
def test_splits_are_complete_and_sorted_by_decreasing_micro_batch(effective_batch: int, world_size: int) -> None:
    smallest_batch = Batch(1, effective_batch, world_size)

    splits = list_batch_splits(smallest_batch)

    assert {batch.effective for batch in splits} == {smallest_batch.effective}
    assert {batch.world_size for batch in splits} == {world_size}
    assert [batch.micro_batch_size for batch in splits] == [
        n for n in range(effective_batch, 0, -1) if effective_batch % n == 0
    ]


@given(samples=st.integers(1, 100_000), max_micro_batch_size=st.integers(0, 100_000))
def test_largest_fitting_split_is_found_with_few_trials(samples: int, max_micro_batch_size: int) -> None:
    tried_batches = []

    def fits_in_memory(batch: Batch) -> bool:
        tried_batches.append(batch)
        return batch.micro_batch_size <= max_micro_batch_size

    largest_batch = find_largest_fitting_batch(list_batch_splits(Batch(1, samples, 4)), fits_in_memory)

    fitting_sizes = [size for size in range(1, min(samples, max_micro_batch_size) + 1) if samples % size == 0]
    assert (largest_batch.micro_batch_size if largest_batch else None) == max(fitting_sizes, default=None)
    assert len(tried_batches) <= 8  # numbers below 100000 have at most 128 divisors, and log2(128) = 7


def test_auto_batch_size_requires_an_effective_batch_divisible_by_the_world_size() -> None:
    with pytest.raises(BatchError, match=r"globalBatchSize 7 .* the nearest multiples: 4 or 8"):
        resolve(AUTO, None, 7, ranks=4)
