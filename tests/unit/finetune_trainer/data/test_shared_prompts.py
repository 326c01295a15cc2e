"""Tests of micro-batches that contain the prompt of a preference pair once."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.shared_prompts import count_shared_tokens
from finetune_trainer.data.token_dataset import IGNORE_INDEX, REFERENCE_LOGPS, Features

SHARING = SequenceLayout(padding_free=True, shares_prompts=True)
SEPARATE = SequenceLayout(padding_free=True)
FILLER = {"input_ids": torch.zeros(1, dtype=torch.int64), "labels": torch.full((1,), IGNORE_INDEX)}
IMAGE_TOKEN = 99

Pair = tuple[Features, ...]


def build_sequence(prompt: Sequence[int], completion: Sequence[int], **features: torch.Tensor) -> Features:
    """Build a sequence whose completion is the target."""
    labels = torch.tensor([*[IGNORE_INDEX] * len(prompt), *completion])
    return {"input_ids": torch.tensor([*prompt, *completion]), "labels": labels, **features}


def build_pair(prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]) -> Pair:
    return build_sequence(prompt, chosen), build_sequence(prompt, rejected)


def read_sequences(batch: MicroBatch) -> list[list[int]]:
    """Return the token ids to which the last token of each sequence attends."""
    ids, lengths = batch.inputs["input_ids"][0], batch.inputs["sequence_lengths"]
    own = torch.split(ids, list(lengths.values))
    prefixes = lengths.prefixes or [range(0)] * len(own)
    return [
        [*ids[prefix.start : prefix.stop].tolist(), *tokens.tolist()]
        for prefix, tokens in zip(prefixes, own, strict=True)
    ]


def read_targets(batch: MicroBatch) -> list[tuple[int, int, int, int]]:
    """Return sequence, id, predecessor and position of the predecessor in its sequence of each target."""
    targets, inputs = batch.targets, batch.inputs
    predecessors, positions = (inputs[name][0][targets.positions] for name in ("input_ids", "position_ids"))
    columns = (targets.sequences, targets.ids, predecessors, positions)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_the_rejected_sequence_continues_the_prompt_of_the_chosen_one() -> None:
    batch = Collator(0, SHARING)([build_pair([1, 2, 3], [4, 5], [6]), build_pair([7, 8], [9], [10, 11])])

    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 3, 6, 7, 8, 9, 8, 10, 11]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 1, 2, 3]]
    assert batch.inputs["sequence_lengths"].values == (5, 2, 3, 3)
    assert batch.inputs["sequence_lengths"].prefixes == (range(0), range(2), range(5, 5), range(7, 8))
    assert batch.inputs["cu_seq_lens_k"].tolist() == [0, 5, 9, 12, 16]
    assert batch.lengths == (5, 3, 4, 4)  # chosen sequences first
    assert batch.target_counts == (2, 1, 1, 2)
    assert batch.shared_lengths == (2, 1)


sequences = st.lists(st.integers(1, 5), min_size=1, max_size=6)
pairs = st.builds(build_pair, st.lists(st.integers(1, 5), max_size=12), sequences, sequences)


@settings(deadline=None)
@given(st.lists(pairs | st.just((FILLER, FILLER)), min_size=1, max_size=4))
def test_sequences_and_targets_are_those_of_separate_sequences(rows: list[Pair]) -> None:
    rows = [
        tuple({**sequence, REFERENCE_LOGPS: torch.tensor([float(number)])} for sequence in row)
        for number, row in enumerate(rows)
    ]
    shared, separate = (Collator(0, layout)(rows) for layout in (SHARING, SEPARATE))

    assert sorted(read_sequences(shared)) == sorted(read_sequences(separate))
    assert read_targets(shared) == read_targets(separate)
    assert (shared.lengths, shared.target_counts) == (separate.lengths, separate.target_counts)
    assert torch.equal(shared.reference_logps, separate.reference_logps)  # type: ignore[arg-type]
    saved = separate.inputs["input_ids"].numel() - shared.inputs["input_ids"].numel()
    assert sum(shared.shared_lengths) == saved


@pytest.mark.parametrize(
    ("pair", "count"),
    [
        pytest.param(build_pair([1, 2, 3], [4], [4]), 2, id="equal completions"),
        pytest.param(build_pair([1, 2, 3], [4], [5]), 2, id="the last token of the prompt predicts two targets"),
        pytest.param((build_sequence([1, 2, 9], [4]), build_sequence([1, 2, 3], [4])), 2, id="another prompt"),
        pytest.param((build_sequence([1, 2], [3, 4]), build_sequence([1, 2, 3], [4])), 1, id="an earlier target"),
    ],
)
def test_prompts_are_shared_up_to_the_first_difference_or_target(pair: Pair, count: int) -> None:
    assert count_shared_tokens([pair]) == (count,)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([build_pair([1], [2], [3])], id="prompt of one token"),
        pytest.param([(FILLER, FILLER)], id="filler"),
        pytest.param([build_pair([1, 2], range(10), range(10))], id="short prompt"),
    ],
)
def test_pairs_with_few_shared_tokens_stay_separate(rows: list[Pair]) -> None:
    batch = Collator(0, SHARING)(rows)

    assert count_shared_tokens(rows) in ((), (0,))
    assert not batch.shared_lengths
    assert "key_positions" not in batch.inputs


def test_pixel_inputs_of_a_shared_prompt_are_included_once() -> None:
    first, second = (torch.full((2, 3), value) for value in (1.0, 2.0))
    rows = [
        tuple(build_sequence([IMAGE_TOKEN, 1, 2, 3], completion, pixel_values=pixels) for completion in ([4], [5]))
        for pixels in (first, second)
    ]

    batch = Collator(0, SHARING, visual_token_ids=(IMAGE_TOKEN,))(rows)

    assert batch.shared_lengths == (3, 3)
    assert torch.equal(batch.inputs["pixel_values"], torch.cat((first, second)))


@pytest.mark.parametrize(
    "rejected",
    [
        pytest.param(build_sequence([IMAGE_TOKEN, 1, 2], [5], pixel_values=torch.zeros(1)), id="another image"),
        pytest.param(build_sequence([1, 2, IMAGE_TOKEN], [5]), id="the image follows the shared tokens"),
        pytest.param(build_sequence([IMAGE_TOKEN, 1, 2], [IMAGE_TOKEN]), id="an image in the completion"),
    ],
)
def test_pairs_with_different_images_stay_separate(rejected: Features) -> None:
    pixels = {"pixel_values": torch.ones(1)}
    chosen = build_sequence([IMAGE_TOKEN, 1, 2], [4], **pixels)

    batch = Collator(0, SHARING, visual_token_ids=(IMAGE_TOKEN,))([(chosen, {**pixels, **rejected})])

    assert not batch.shared_lengths
    assert len(batch.inputs["pixel_values"]) == 2
