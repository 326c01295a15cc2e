"""Tests log lines about row lengths and visual tokens, and the selection of the costliest items."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import Batch
from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data.batch_sampler import BatchSampler
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.length_stats import (
    describe_lengths,
    describe_visual_tokens,
    find_longest_rows,
    format_rows,
    select_costliest_items,
)
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.token_cache import CacheRole, load_or_tokenize
from finetune_trainer.data.token_dataset import FILLER, TokenDataset


def build_dataset(folder: Path, lengths: list[int], *, lines: list[int] | None = None) -> TokenDataset:
    rows = [
        (Sample(f"rows.jsonl line {line}", [1] * length, [0.0] + [1.0] * (length - 1)),)
        for line, length in zip(lines or range(1, len(lengths) + 1), lengths, strict=True)
    ]
    return load_or_tokenize(
        folder / "key", lambda: rows, rules=RowRules(), role=CacheRole.WRITER, send_heartbeat=lambda: None
    )


def test_the_log_contains_a_histogram_and_the_longest_rows(tmp_path: Path) -> None:
    assert list(describe_lengths(build_dataset(tmp_path, [5, 8, 9, 70, 6]))) == [
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
def test_a_histogram_covers_all_rows_with_at_most_eight_bins(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    _, *bars, _ = describe_lengths(build_dataset(tmp_path_factory.mktemp("tokens"), lengths))

    assert len(bars) <= 8
    assert sum(int(bar.split(" rows")[0].split()[-1]) for bar in bars) == len(lengths)


def test_only_multimodal_rows_are_in_the_histogram_of_visual_tokens(tmp_path: Path) -> None:
    image, video = 7, 8
    input_ids = ([1, image, image, 1], [1, 1], [video] * 9, [image])
    rows = [
        (Sample(f"rows.jsonl line {number}", ids, [1.0] * len(ids)),) for number, ids in enumerate(input_ids, start=1)
    ]
    data = load_or_tokenize(
        tmp_path / "key", lambda: rows, rules=RowRules(), role=CacheRole.WRITER, send_heartbeat=lambda: None
    )

    assert list(describe_visual_tokens(data, (image, video))) == [
        "visual tokens of 3 rows: 1 to 9 tokens, median 2",
        "  up to  1 tokens  1 rows  ########################################",
        "  up to  2 tokens  1 rows  ########################################",
        "  up to  4 tokens  0 rows",
        "  up to  8 tokens  0 rows",
        "  up to 16 tokens  1 rows  ########################################",
        "most visual tokens: rows.jsonl line 3 (9), rows.jsonl line 1 (2), rows.jsonl line 4 (1)",
    ]
    assert list(describe_visual_tokens(data, (99,))) == []


def test_a_pair_has_the_larger_token_count_of_its_two_sequences(tmp_path: Path) -> None:
    pair = tuple(Sample("rows.jsonl line 1", [7] * count + [1], [1.0] * (count + 1)) for count in (2, 5))
    data = load_or_tokenize(
        tmp_path / "key", lambda: [pair], rules=RowRules(), role=CacheRole.WRITER, send_heartbeat=lambda: None
    )

    assert data.count_token_ids((7,)).tolist() == [5]


def test_the_list_of_longest_rows_omits_copies(tmp_path: Path) -> None:
    data = build_dataset(tmp_path, [*range(10, 30), 29], lines=[*range(10, 30), 29])

    descriptions = format_rows(data, find_longest_rows(data, 10))

    assert descriptions == [f"rows.jsonl line {length} ({length})" for length in range(29, 19, -1)]


@given(
    row_count=st.integers(1, 60),
    micro_batch_size=st.integers(1, 4),
    accumulation_steps=st.integers(1, 3),
    epoch=st.integers(0, 4),
)
def test_no_micro_batch_has_longer_rows_than_the_costliest_items(
    row_count: int, micro_batch_size: int, accumulation_steps: int, epoch: int
) -> None:
    lengths = np.random.default_rng(row_count).integers(2, 200, row_count)
    for order in (RowOrder(lengths, seed=1), PackOrder(lengths, max_length=200, seed=1)):
        current = order.get_epoch(epoch)
        length_of = {FILLER: 1, **dict(zip(current.items, current.lengths.tolist(), strict=True))}
        sampler = BatchSampler(order, Batch(micro_batch_size, accumulation_steps, 1), rank=0)
        sampler.set_epoch(epoch)
        first = order.get_epoch(0)
        length_in_first = {FILLER: 1, **dict(zip(first.items, first.lengths.tolist(), strict=True))}

        upper_bounds = sorted(
            (length_in_first[item] for item in select_costliest_items(order, micro_batch_size)), reverse=True
        )

        assert len(upper_bounds) == micro_batch_size
        for items in sampler:
            longest_first = sorted((length_of[item] for item in items), reverse=True)
            assert len(items) <= micro_batch_size
            assert all(length <= bound for length, bound in zip(longest_first, upper_bounds, strict=False))


def test_a_pack_is_described_by_its_token_count_and_longest_row(tmp_path: Path) -> None:
    data = build_dataset(tmp_path, [5, 8, 9])

    assert format_rows(data, [(0, 1), (2,), FILLER]) == [
        "a pack of 13 with rows.jsonl line 2 (8)",
        "a pack of 9 with rows.jsonl line 3 (9)",
    ]
