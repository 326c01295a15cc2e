"""What the log says of the rows' lengths, and which micro-batch costs most."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import Batch
from finetune_trainer.data.batch_sampler import BatchSampler
from finetune_trainer.data.chat_template import Sample
from finetune_trainer.data.epoch_order import PackOrder, RowOrder
from finetune_trainer.data.length_stats import costliest, describe_lengths, describe_shown, longest, name_rows
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.data.token_cache import obtain_tokens
from finetune_trainer.data.token_dataset import FILLER, TokenDataset


def dataset(folder: Path, lengths: list[int], *, lines: list[int] | None = None) -> TokenDataset:
    rows = [
        (Sample(f"rows.jsonl line {line}", [1] * length, [0.0] + [1.0] * (length - 1)),)
        for line, length in zip(lines or range(1, len(lengths) + 1), lengths, strict=True)
    ]
    return obtain_tokens(folder / "key", lambda: rows, rules=Rules(), writes=True, alive=lambda: None)


def test_a_histogram_counts_every_row_and_the_longest_are_named(tmp_path: Path) -> None:
    assert list(describe_lengths(dataset(tmp_path, [5, 8, 9, 70, 6]))) == [
        "lengths: 5 to 70 tokens, median 8",
        "  up to   8 tokens  3 rows  ########################################",
        "  up to  16 tokens  1 rows  ##############",
        "  up to  32 tokens  0 rows",
        "  up to  64 tokens  0 rows",
        "  up to 128 tokens  1 rows  ##############",
        "longest: rows.jsonl line 4 (70), rows.jsonl line 3 (9), rows.jsonl line 2 (8), rows.jsonl line 5 (6),"
        " rows.jsonl line 1 (5)",
    ]


@given(lengths=st.lists(st.integers(2, 5000), min_size=1, max_size=40))
def test_a_histogram_is_short_and_complete(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    _, *bars, _ = describe_lengths(dataset(tmp_path_factory.mktemp("tokens"), lengths))

    assert len(bars) <= 8
    assert sum(int(bar.split(" rows")[0].split()[-1]) for bar in bars) == len(lengths)


def test_visual_tokens_are_told_of_the_rows_that_have_some(tmp_path: Path) -> None:
    image, video = 7, 8
    shown = ([1, image, image, 1], [1, 1], [video] * 9, [image])
    rows = [(Sample(f"rows.jsonl line {number}", ids, [1.0] * len(ids)),) for number, ids in enumerate(shown, start=1)]
    data = obtain_tokens(tmp_path / "key", lambda: rows, rules=Rules(), writes=True, alive=lambda: None)

    assert list(describe_shown(data, (image, video))) == [
        "visual tokens of 3 rows: 1 to 9 tokens, median 2",
        "  up to  1 tokens  1 rows  ########################################",
        "  up to  2 tokens  1 rows  ########################################",
        "  up to  4 tokens  0 rows",
        "  up to  8 tokens  0 rows",
        "  up to 16 tokens  1 rows  ########################################",
        "most visual tokens: rows.jsonl line 3 (9), rows.jsonl line 1 (2), rows.jsonl line 4 (1)",
    ]
    assert list(describe_shown(data, (99,))) == []


def test_the_sequence_of_a_pair_that_shows_most_counts(tmp_path: Path) -> None:
    pair = tuple(Sample("rows.jsonl line 1", [7] * count + [1], [1.0] * (count + 1)) for count in (2, 5))
    data = obtain_tokens(tmp_path / "key", lambda: [pair], rules=Rules(), writes=True, alive=lambda: None)

    assert data.count((7,)).tolist() == [5]


def test_ten_are_named_and_copies_once(tmp_path: Path) -> None:
    data = dataset(tmp_path, [*range(10, 30), 29], lines=[*range(10, 30), 29])

    named = name_rows(data, longest(data, 10))

    assert named == [f"rows.jsonl line {length} ({length})" for length in range(29, 19, -1)]


@given(size=st.integers(1, 60), per_device=st.integers(1, 4), accumulation=st.integers(1, 3), epoch=st.integers(0, 4))
def test_no_micro_batch_of_any_epoch_is_longer_than_the_costliest(
    size: int, per_device: int, accumulation: int, epoch: int
) -> None:
    lengths = np.random.default_rng(size).integers(2, 200, size)
    for order in (RowOrder(lengths, seed=1), PackOrder(lengths, room=200, seed=1)):
        found = order.epoch(epoch)
        length_of = {FILLER: 1, **dict(zip(found.items, found.lengths.tolist(), strict=True))}
        sampler = BatchSampler(order, Batch(per_device, accumulation, 1), rank=0)
        sampler.set_epoch(epoch)
        first = order.epoch(0)
        length_at_first = {FILLER: 1, **dict(zip(first.items, first.lengths.tolist(), strict=True))}

        most = sorted((length_at_first[item] for item in costliest(order, per_device)), reverse=True)

        assert len(most) == per_device
        for items in sampler:
            assert all(a <= b for a, b in zip(sorted((length_of[i] for i in items), reverse=True), most, strict=True))


def test_a_pack_is_named_with_its_longest_row(tmp_path: Path) -> None:
    data = dataset(tmp_path, [5, 8, 9])

    assert name_rows(data, [(0, 1), (2,), FILLER]) == [
        "a pack of 13 with rows.jsonl line 2 (8)",
        "a pack of 9 with rows.jsonl line 3 (9)",
    ]
