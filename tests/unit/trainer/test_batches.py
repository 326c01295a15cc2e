import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import Batch
from finetune_trainer.data.batches import BatchSampler, Collator
from finetune_trainer.data.tokens import FILLER, IGNORED, Features


def steps(size: int, batch: Batch, *, epoch: int = 0, seed: int | None = 1) -> list[set[int]]:
    """The samples of each optimizer step, over all ranks."""
    micro: list[list[list[int]]] = []
    for rank in range(batch.world_size):
        sampler = BatchSampler(size, batch, rank=rank, seed=seed)
        sampler.set_epoch(epoch)
        micro.append(list(sampler))
        assert len(micro[-1]) == len(sampler)
    rounds = [[index for each in group for index in each] for group in zip(*micro, strict=True)]
    grouped = [rounds[start : start + batch.accumulation] for start in range(0, len(rounds), batch.accumulation)]
    return [{index for each in group for index in each if index != FILLER} for group in grouped]


LAYOUTS = [Batch(8, 1, 2), Batch(4, 2, 2), Batch(1, 16, 1), Batch(16, 1, 1), Batch(1, 4, 4)]


@pytest.mark.parametrize("batch", LAYOUTS, ids=str)
@given(size=st.integers(1, 100), epoch=st.integers(0, 3))
def test_every_layout_puts_the_same_samples_into_each_step(batch: Batch, size: int, epoch: int) -> None:
    assert steps(size, batch, epoch=epoch) == steps(size, LAYOUTS[2], epoch=epoch)


@given(size=st.integers(1, 100), per_device=st.integers(1, 5), accumulation=st.integers(1, 5), ranks=st.integers(1, 5))
def test_an_epoch_sees_every_sample_once(size: int, per_device: int, accumulation: int, ranks: int) -> None:
    seen = [index for step in steps(size, Batch(per_device, accumulation, ranks)) for index in step]

    assert sorted(seen) == list(range(size))


def test_epochs_and_seeds_shuffle_differently() -> None:
    batch = Batch(4, 1, 1)

    orders = [steps(64, batch), steps(64, batch, epoch=1), steps(64, batch, seed=2)]

    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_without_a_seed_the_order_is_that_of_the_rows() -> None:
    assert list(BatchSampler(4, Batch(2, 1, 1), rank=0, seed=None)) == [[0, 1], [2, 3]]


def test_padding_is_masked_and_ignored() -> None:
    samples = [
        ({"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([IGNORED, 2, 3])},),
        ({"input_ids": torch.tensor([4]), "labels": torch.tensor([IGNORED])},),
    ]

    batch = Collator(pad_id=9)(samples)

    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3], [IGNORED, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_of_pairs_the_chosen_come_first() -> None:
    def sequence(token: int) -> Features:
        return {"input_ids": torch.tensor([token]), "labels": torch.tensor([token]), "weights": torch.tensor([0.5])}

    batch = Collator(pad_id=9)([(sequence(1), sequence(2)), (sequence(3), sequence(4))])

    assert batch["input_ids"].flatten().tolist() == [1, 3, 2, 4]
    assert batch["weights"].shape == (4, 1)
