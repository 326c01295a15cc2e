"""Tests the layouts of micro-batches and the targets that the collator finds."""

from collections.abc import Sequence

import pytest
import torch

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.token_dataset import (
    IGNORE_INDEX,
    MROPE_POSITION_IDS,
    POSITION_IDS,
    REFERENCE_LOGPS,
    Features,
)
from testing.models.micro_batches import build_micro_batch

PADDING_FREE = SequenceLayout(padding_free=True)
LAYOUTS = (SequenceLayout(), SequenceLayout(pad_multiple=8), SequenceLayout(masks_padding=False), PADDING_FREE)


def build_sequence(ids: Sequence[int], *, targets: Sequence[int] = (), **features: torch.Tensor) -> Features:
    """Build a sequence. targets: indices of its target tokens."""
    labels = torch.full((len(ids),), IGNORE_INDEX)
    labels[list(targets)] = torch.tensor(ids)[list(targets)]
    return {"input_ids": torch.tensor(ids), "labels": labels, **features}


def build_pack(*lengths: int, targets: Sequence[int] = ()) -> Features:
    """Build a pack of rows with these lengths, whose token ids ascend from 1."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return build_sequence(range(1, sum(lengths) + 1), targets=targets, **{POSITION_IDS: positions})


def test_padding_is_on_the_right_and_masked() -> None:
    batch = Collator(9, SequenceLayout())([(build_sequence([1, 2, 3]),), (build_sequence([4]),)])

    assert batch.inputs.keys() == {"input_ids", "attention_mask"}
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_padded_rows_may_have_no_mask() -> None:
    batch = build_micro_batch([1, 2, 3], [4], layout=SequenceLayout(masks_padding=False))

    assert batch.inputs.keys() == {"input_ids"}


@pytest.mark.parametrize(("length", "padded_length"), [(1, 64), (64, 64), (65, 128)])
def test_the_length_of_padded_rows_is_rounded_up(length: int, padded_length: int) -> None:
    batch = build_micro_batch(range(length), [4], layout=SequenceLayout(pad_multiple=64))

    assert batch.inputs["input_ids"].shape == batch.inputs["attention_mask"].shape == (2, padded_length)
    assert batch.inputs["attention_mask"].sum(dim=1).tolist() == [length, 1]


def test_all_sequences_are_in_one_row_without_padding() -> None:
    batch = build_micro_batch([1, 2, 3], [4], [5, 6], layout=PADDING_FREE)

    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch.inputs["cu_seq_lens_q"].tolist() == batch.inputs["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert batch.inputs["cu_seq_lens_q"].dtype == torch.int32
    assert batch.inputs["max_length_q"] == batch.inputs["max_length_k"] == 3
    assert batch.inputs["sequence_lengths"].values == batch.lengths == (3, 1, 2)


def test_padding_tokens_of_a_pack_have_position_id_0() -> None:
    batch = Collator(9, SequenceLayout())([(build_pack(2, 3),), (build_pack(2),)])

    assert batch.inputs.keys() == {"input_ids", "position_ids"}
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch.lengths == (2, 3, 2)


def test_the_rows_of_packs_are_sequences_of_one_row_without_padding() -> None:
    batch = Collator(9, PADDING_FREE)([(build_pack(2, 3),), (build_pack(2),)])

    assert batch.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert batch.inputs["sequence_lengths"].values == batch.lengths == (2, 3, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_targets_are_the_tokens_after_their_positions(layout: SequenceLayout) -> None:
    rows = [
        (build_sequence([1, 2, 3], targets=[1, 2]),),
        (build_sequence([4]),),
        (build_sequence([5, 6], targets=[1]),),
    ]

    batch = Collator(0, layout)(rows)

    ids = batch.inputs["input_ids"].flatten()
    assert batch.targets.ids.tolist() == [2, 3, 6]
    assert ids[batch.targets.positions].tolist() == [1, 2, 5]
    assert ids[batch.targets.positions + 1].tolist() == [2, 3, 6]
    assert batch.targets.sequences.tolist() == [0, 0, 2]
    assert batch.target_counts == (2, 0, 1)
    assert batch.targets.weights is None
    assert batch.real_token_count == 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_targets_of_packs_belong_to_their_rows(layout: SequenceLayout) -> None:
    batch = Collator(0, layout)([(build_pack(2, 3, targets=[1, 3, 4]),), (build_pack(2, targets=[1]),)])

    assert batch.inputs["input_ids"].flatten()[batch.targets.positions].tolist() == [1, 3, 4, 1]
    assert batch.targets.ids.tolist() == [2, 4, 5, 2]
    assert batch.targets.sequences.tolist() == [0, 1, 1, 2]
    assert batch.target_counts == (1, 2, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_filler_has_no_targets(layout: SequenceLayout) -> None:
    batch = Collator(0, layout)([(build_sequence([0]),)])

    assert batch.target_counts == (0,)
    assert batch.real_token_count == len(batch.targets.ids) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chosen_sequences_precede_rejected_sequences(layout: SequenceLayout) -> None:
    def build_completion(token: int) -> Features:
        features = {"weights": torch.tensor([0.0, token / 10]), REFERENCE_LOGPS: torch.tensor([-float(token)])}
        return build_sequence([0, token], targets=[1], **features)

    rows = [(build_completion(1), build_completion(2)), (build_completion(3), build_completion(4))]

    batch = Collator(9, layout)(rows)

    assert batch.targets.ids.tolist() == [1, 3, 2, 4]
    assert batch.targets.sequences.tolist() == [0, 1, 2, 3]
    assert batch.targets.weights is not None
    torch.testing.assert_close(batch.targets.weights, torch.tensor([0.1, 0.3, 0.2, 0.4]))
    assert batch.reference_logps is not None
    assert batch.reference_logps.tolist() == [-1.0, -3.0, -2.0, -4.0]


@pytest.mark.parametrize("layout", [SequenceLayout(), PADDING_FREE])
def test_positions_for_mrope_follow_the_text_positions(layout: SequenceLayout) -> None:
    mrope_ids = torch.arange(6).view(2, 3)
    pack = {**build_pack(2), MROPE_POSITION_IDS: mrope_ids}

    positions = Collator(0, layout)([(pack,)]).inputs["position_ids"]

    assert positions.tolist() == [[[0, 1]], [[0, 3]], [[1, 4]], [[2, 5]]]


def test_positions_for_mrope_are_computed_for_sequences_without_padding() -> None:
    collate = Collator(0, PADDING_FREE, lambda sequence: sequence["input_ids"].unsqueeze(1).expand(-1, 3))

    positions = collate([(build_sequence([7, 8]),), (build_sequence([9]),)]).inputs["position_ids"]

    assert positions.tolist() == [[[0, 1, 0]], *[[[7, 8, 9]]] * 3]


def test_a_batch_on_another_device_has_the_same_content() -> None:
    batch = build_micro_batch([1, 2, 3], [4], layout=PADDING_FREE)

    moved = batch.to(torch.device("meta"))

    assert {moved.inputs[name].device.type for name in ("input_ids", "cu_seq_lens_q")} == {"meta"}
    assert {tensor.device.type for tensor in (moved.targets.positions, moved.targets.ids)} == {"meta"}
    assert moved.inputs["sequence_lengths"].values == moved.lengths == (3, 1)
    assert moved.targets.weights is moved.reference_logps is None
