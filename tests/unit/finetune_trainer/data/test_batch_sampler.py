"""Which samples make up a step, and how they are dealt out to ranks and micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import Batch
from finetune_trainer.data.batch_sampler import BatchSampler, Collator, padding_share
from finetune_trainer.data.epoch_order import Item, Order, PackOrder, RowOrder
from finetune_trainer.data.token_dataset import FILLER, IGNORED, Features, Numbers

LAYOUTS = [Batch(8, 1, 2), Batch(4, 2, 2), Batch(1, 16, 1), Batch(16, 1, 1), Batch(1, 4, 4)]


def lengths(size: int, *, seed: int = 0) -> Numbers:
    return np.random.default_rng(seed).integers(2, 500, size)


def shuffled(size: int, *, seed: int = 1) -> RowOrder:
    return RowOrder(lengths(size), seed=seed)


def rounds(order: Order, batch: Batch, *, epoch: int = 0) -> list[list[list[Item]]]:
    """The micro-batches of each round, rank by rank."""
    micro: list[list[list[Item]]] = []
    for rank in range(batch.world_size):
        sampler = BatchSampler(order, batch, rank=rank)
        sampler.set_epoch(epoch)
        micro.append(list(sampler))
        assert len(micro[-1]) == len(sampler)
        assert all(len(items) == batch.per_device for items in micro[-1])
    return [list(group) for group in zip(*micro, strict=True)]


def steps(order: Order, batch: Batch, *, epoch: int = 0) -> list[set[Item]]:
    """The samples of each optimizer step, over all ranks."""
    each = [[item for items in group for item in items] for group in rounds(order, batch, epoch=epoch)]
    grouped = [each[start : start + batch.accumulation] for start in range(0, len(each), batch.accumulation)]
    return [{item for items in group for item in items if item != FILLER} for group in grouped]


@pytest.mark.parametrize("batch", LAYOUTS, ids=str)
@given(size=st.integers(1, 100), epoch=st.integers(0, 3))
def test_every_layout_puts_the_same_samples_into_each_step(batch: Batch, size: int, epoch: int) -> None:
    assert steps(shuffled(size), batch, epoch=epoch) == steps(shuffled(size), LAYOUTS[2], epoch=epoch)


@pytest.mark.parametrize("batch", LAYOUTS, ids=str)
@given(size=st.integers(1, 100), epoch=st.integers(0, 3))
def test_every_layout_puts_the_same_packs_into_each_step(batch: Batch, size: int, epoch: int) -> None:
    order = PackOrder(lengths(size), room=600, seed=1)

    assert steps(order, batch, epoch=epoch) == steps(order, LAYOUTS[2], epoch=epoch)


@given(size=st.integers(1, 100), per_device=st.integers(1, 5), accumulation=st.integers(1, 5), ranks=st.integers(1, 5))
def test_an_epoch_sees_every_sample_once(size: int, per_device: int, accumulation: int, ranks: int) -> None:
    seen = [item for step in steps(shuffled(size), Batch(per_device, accumulation, ranks)) for item in step]

    assert sorted(map(int, seen)) == list(range(size))  # type: ignore[arg-type]


@given(size=st.integers(1, 100), per_device=st.integers(1, 5), accumulation=st.integers(1, 5), ranks=st.integers(1, 5))
def test_a_step_is_that_part_of_the_shuffled_rows_whatever_their_lengths(
    size: int, per_device: int, accumulation: int, ranks: int
) -> None:
    batch, order = Batch(per_device, accumulation, ranks), shuffled(size)
    items = order.epoch(0).items

    assert steps(order, batch) == [set(items[n : n + batch.effective]) for n in range(0, size, batch.effective)]


def test_epochs_and_seeds_shuffle_differently() -> None:
    batch = Batch(4, 1, 1)

    orders = [steps(shuffled(64), batch), steps(shuffled(64), batch, epoch=1), steps(shuffled(64, seed=2), batch)]

    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_without_a_seed_the_longest_rows_come_first() -> None:
    order = RowOrder(np.array([5, 9, 7, 9]), seed=None)

    assert list(BatchSampler(order, Batch(2, 1, 1), rank=0)) == [[1, 3], [2, 0]]


def test_micro_batches_and_rounds_hold_rows_of_similar_length() -> None:
    order, batch = RowOrder(np.array([1, 2, 3, 4, 5, 6, 7, 8]), seed=5), Batch(2, 2, 2)

    told = [[[int(item) + 1 for item in items] for items in each] for each in rounds(order, batch)]  # type: ignore[arg-type]

    assert told == [[[8, 7], [6, 5]], [[2, 1], [4, 3]]], "the longest first; the second round is dealt backwards"


def test_ranks_get_similar_work() -> None:
    order, batch = shuffled(64 * 20), Batch(4, 4, 4)
    size_of = dict(enumerate(lengths(64 * 20).tolist()))

    work = np.array(
        [[max(size_of[item] for item in items) for items in each] for each in rounds(order, batch)]  # type: ignore[index]
    ).reshape(20, 4, 4)  # (steps, rounds, ranks)

    per_rank = work.sum(axis=1)
    assert (per_rank.max(axis=1) / per_rank.min(axis=1)).max() < 1.25


def test_sorting_within_a_step_saves_padding() -> None:
    """Of 37 % with micro-batches of four as they come, 8 % are left."""
    order, size = shuffled(1600), lengths(1600)
    items = np.array(order.epoch(0).items)
    as_they_come = 1 - size.sum() / (size[items].reshape(-1, 4).max(axis=1).sum() * 4)

    sorted_within_steps = padding_share(order, Batch(4, 8, 1))

    assert as_they_come > 0.35
    assert sorted_within_steps < 0.1


@given(size=st.integers(1, 60), per_device=st.integers(1, 4), accumulation=st.integers(1, 3), ranks=st.integers(1, 3))
def test_the_share_of_padding_is_what_the_micro_batches_have(
    size: int, per_device: int, accumulation: int, ranks: int
) -> None:
    order, batch = shuffled(size), Batch(per_device, accumulation, ranks)
    size_of = {FILLER: 0, **dict(enumerate(lengths(size).tolist()))}

    computed = sum(
        per_device * max(size_of[item] for item in items)  # type: ignore[index]
        for each in rounds(order, batch)
        for items in each
    )

    assert padding_share(order, batch) == pytest.approx(1 - sum(size_of.values()) / computed)


def test_padding_is_masked_and_ignored() -> None:
    samples = [
        ({"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([IGNORED, 2, 3])},),
        ({"input_ids": torch.tensor([4]), "labels": torch.tensor([IGNORED])},),
    ]

    batch = Collator(pad_id=9)(samples)

    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3], [IGNORED, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_padding_behind_packs_begins_anew_with_every_token() -> None:
    def pack(positions: list[int]) -> tuple[Features]:
        ids = torch.arange(len(positions))
        return ({"input_ids": ids, "labels": ids, "position_ids": torch.tensor(positions)},)

    batch = Collator(pad_id=9)([pack([0, 1, 0, 1, 2]), pack([0, 1])])

    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["attention_mask"].sum() == 7


def test_of_pairs_the_chosen_come_first() -> None:
    def sequence(token: int) -> Features:
        return {"input_ids": torch.tensor([token]), "labels": torch.tensor([token]), "weights": torch.tensor([0.5])}

    batch = Collator(pad_id=9)([(sequence(1), sequence(2)), (sequence(3), sequence(4))])

    assert batch["input_ids"].flatten().tolist() == [1, 3, 2, 4]
    assert batch["weights"].shape == (4, 1)
