"""Tests the assignment of samples to optimizer steps, ranks and micro-batches."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import Dataset

from finetune_api.batch import Batch
from finetune_trainer.data.batch_sampler import BatchSampler, build_dataloader, compute_padding_share, count_mixed_items
from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.epoch_order import Item, ItemOrder, RowOrder
from finetune_trainer.data.late_skips import LateSkips
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.data.token_dataset import FILLER, Features


def draw_lengths(row_count: int, *, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(2, 500, row_count)


def build_shuffled_order(row_count: int, *, seed: int = 1) -> RowOrder:
    return RowOrder(draw_lengths(row_count), seed=seed)


def collect_rounds(order: ItemOrder, batch: Batch, *, epoch: int = 0) -> list[list[list[Item]]]:
    """Return the micro-batches of all ranks for each round."""
    per_rank: list[list[list[Item]]] = []
    for rank in range(batch.world_size):
        sampler = BatchSampler(order, batch, rank=rank)
        sampler.set_epoch(epoch)
        per_rank.append(list(sampler))
        assert len(per_rank[-1]) == len(sampler)
        assert all(0 < len(items) <= batch.micro_batch_size for items in per_rank[-1])
        assert all(FILLER not in items or items == [FILLER] for items in per_rank[-1]), "fillers count nowhere"
    return [list(micro_batches) for micro_batches in zip(*per_rank, strict=True)]


def collect_steps(order: ItemOrder, batch: Batch, *, epoch: int = 0) -> list[set[Item]]:
    """Return the samples of all ranks for each optimizer step, without fillers."""
    rounds = [[item for items in ranks for item in items] for ranks in collect_rounds(order, batch, epoch=epoch)]
    steps = [
        rounds[start : start + batch.accumulation_steps] for start in range(0, len(rounds), batch.accumulation_steps)
    ]
    return [{item for items in step for item in items if item != FILLER} for step in steps]


@given(
    row_count=st.integers(1, 100),
    batch=st.builds(Batch, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    epoch=st.integers(0, 3),
    packing=st.booleans(),
)
def test_each_step_consumes_the_next_rows_or_packs_in_shuffled_order(
    row_count: int, batch: Batch, epoch: int, packing: bool
) -> None:
    rows = build_shuffled_order(row_count)
    order = PackOrder(draw_lengths(row_count), max_length=600, seed=1) if packing else rows
    items = order.get_epoch(epoch).items

    assert collect_steps(order, batch, epoch=epoch) == [
        set(items[n : n + batch.effective]) for n in range(0, len(items), batch.effective)
    ]


def test_the_sample_order_depends_on_epoch_and_seed() -> None:
    batch = Batch(4, 1, 1)

    orders = [
        collect_steps(build_shuffled_order(64), batch),
        collect_steps(build_shuffled_order(64), batch, epoch=1),
        collect_steps(build_shuffled_order(64, seed=2), batch),
    ]

    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_rows_are_sorted_by_descending_length_without_a_seed() -> None:
    order = RowOrder(np.array([5, 9, 7, 9]), seed=None)

    assert list(BatchSampler(order, Batch(2, 1, 1), rank=0)) == [[1, 3], [2, 0]]


def test_rows_of_a_micro_batch_have_similar_lengths() -> None:
    order, batch = RowOrder(np.array([1, 2, 3, 4, 5, 6, 7, 8]), seed=5), Batch(2, 2, 2)

    row_lengths = [[[int(item) + 1 for item in items] for items in ranks] for ranks in collect_rounds(order, batch)]  # type: ignore[arg-type]

    assert row_lengths == [[[8, 7], [6, 5]], [[2, 1], [4, 3]]], "longest first; the second round is in reverse order"


def test_ranks_get_similar_amounts_of_work() -> None:
    order, batch = build_shuffled_order(64 * 20), Batch(4, 4, 4)
    length_of = dict(enumerate(draw_lengths(64 * 20).tolist()))

    work = np.array(
        [[max(length_of[item] for item in items) for items in ranks] for ranks in collect_rounds(order, batch)]  # type: ignore[index]
    ).reshape(20, 4, 4)  # (steps, rounds, ranks)

    per_rank = work.sum(axis=1)
    assert (per_rank.max(axis=1) / per_rank.min(axis=1)).max() < 1.25


def test_sorting_within_a_step_reduces_padding() -> None:
    """With micro-batches of four rows, sorting reduces the share of padding from 37 % to 8 %."""
    order, lengths = build_shuffled_order(1600), draw_lengths(1600)
    items = np.array(order.get_epoch(0).items)
    unsorted_share = 1 - lengths.sum() / (lengths[items].reshape(-1, 4).max(axis=1).sum() * 4)

    sorted_share = compute_padding_share(order, Batch(4, 8, 1))

    assert unsorted_share > 0.35
    assert sorted_share < 0.1


@given(
    row_count=st.integers(1, 60),
    micro_batch_size=st.integers(1, 4),
    accumulation_steps=st.integers(1, 3),
    world_size=st.integers(1, 3),
)
def test_the_padding_share_matches_the_padding_in_the_micro_batches(
    row_count: int, micro_batch_size: int, accumulation_steps: int, world_size: int
) -> None:
    order, batch = build_shuffled_order(row_count), Batch(micro_batch_size, accumulation_steps, world_size)
    length_of = {FILLER: 0, **dict(enumerate(draw_lengths(row_count).tolist()))}

    computed = sum(
        len(items) * max(length_of[item] for item in items)  # type: ignore[index]
        for rank_items in collect_rounds(order, batch)
        for items in rank_items
    )

    assert compute_padding_share(order, batch) == pytest.approx(1 - sum(length_of.values()) / computed)


@given(
    long_count=st.integers(0, 12),
    short_count=st.integers(0, 12),
    batch=st.builds(Batch, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    packing=st.booleans(),
)
def test_a_micro_batch_has_rows_on_both_sides_of_a_length_limit_only_if_separate_ones_need_more_rounds(
    long_count: int, short_count: int, batch: Batch, packing: bool
) -> None:
    lengths = np.array([60] * (long_count + 1) + [40, 20] * short_count)
    order = (
        PackOrder(lengths, max_length=60, seed=1, length_limit=50)
        if packing
        else RowOrder(lengths, seed=1, length_limit=50)
    )
    rounds, mixed_items = collect_rounds(order, batch), 0

    for first in range(0, len(rounds), batch.accumulation_steps):
        micro_batches = [items for ranks in rounds[first : first + batch.accumulation_steps] for items in ranks]
        sides = [
            [bool(lengths[np.atleast_1d(item)].max() > 50) for item in items if item != FILLER]
            for items in micro_batches
        ]
        separate = sum(-(-sum(each.count(side) for each in sides) // batch.micro_batch_size) for side in (True, False))
        mixed = [each for each in sides if len(set(each)) == 2]
        assert len(mixed) == int(separate > len(micro_batches))
        mixed_items += sum(each.count(False) for each in mixed)
    assert len(rounds) == -(-len(order) // (batch.micro_batch_size * batch.world_size))
    assert count_mixed_items(order, batch) == mixed_items


class ProcessIds(Dataset[tuple[Features, ...]]):
    """Rows whose token is the id of the process that loads them."""

    def __getitem__(self, _index: Item) -> tuple[Features, ...]:
        ids = torch.tensor([os.getpid()])
        return ({"input_ids": ids, "labels": ids},)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_persistent_processes_load_all_epochs(*, is_persistent: bool) -> None:
    sampler = BatchSampler(RowOrder(np.array([1, 1]), seed=0), Batch(1, 2, 1), rank=0)
    loader = build_dataloader(
        ProcessIds(),
        sampler,
        Collator(0, SequenceLayout()),
        skips=LateSkips(),
        worker_count=1,
        is_persistent=is_persistent,
    )

    epochs = [{int(batch.inputs["input_ids"]) for batch in loader} for _ in range(2)]

    assert len(epochs[0]) == 1
    assert os.getpid() not in epochs[0]
    assert (epochs[0] == epochs[1]) == is_persistent


def test_the_padding_share_includes_the_padding_to_a_multiple() -> None:
    order = RowOrder(np.array([60, 64, 65, 1]), seed=0)

    assert compute_padding_share(order, Batch(2, 2, 1), 64) == pytest.approx(1 - 190 / (2 * 128 + 2 * 64))
