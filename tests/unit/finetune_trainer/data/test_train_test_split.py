"""Tests that the evaluation split is disjoint from the training rows and determined by the seed."""

from pathlib import Path

import pytest

from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.token_cache import CacheRole, load_or_tokenize
from finetune_trainer.data.token_dataset import TokenDataset
from finetune_trainer.data.train_test_split import hold_out_rows
from finetune_trainer.errors import DatasetError


def build_dataset(folder: Path, lines: list[int]) -> TokenDataset:
    rows = [(Sample(f"rows line {line}", [line, line], [0.0, 1.0]),) for line in lines]
    return load_or_tokenize(
        folder / "key", lambda: rows, rules=RowRules(), role=CacheRole.WRITER, send_heartbeat=lambda: None
    )


def get_lines(data: TokenDataset) -> list[int]:
    return [int(data.get_origin(index).rpartition(" ")[2]) for index in range(len(data))]


def test_the_split_keeps_every_row_and_has_the_specified_ratio(tmp_path: Path) -> None:
    train, evaluation = hold_out_rows(build_dataset(tmp_path, list(range(100))), 0.1, seed=3)

    assert (len(train), len(evaluation)) == (90, 10)
    assert sorted(get_lines(train) + get_lines(evaluation)) == list(range(100))
    assert get_lines(evaluation) != list(range(10))


def test_the_seed_determines_the_held_out_rows(tmp_path: Path) -> None:
    data = build_dataset(tmp_path, list(range(100)))

    assert get_lines(hold_out_rows(data, 0.1, seed=3)[1]) == get_lines(hold_out_rows(data, 0.1, seed=3)[1])
    assert get_lines(hold_out_rows(data, 0.1, seed=3)[1]) != get_lines(hold_out_rows(data, 0.1, seed=4)[1])


def test_copies_of_a_row_are_on_the_same_side_of_the_split(tmp_path: Path) -> None:
    train, evaluation = hold_out_rows(
        build_dataset(tmp_path, [line for line in range(20) for _ in range(3)]), 0.5, seed=1
    )

    assert set(get_lines(train)).isdisjoint(get_lines(evaluation))
    assert (len(train), len(evaluation)) == (30, 10)


@pytest.mark.parametrize(("ratio", "held_out_count"), [(0.01, 1), (0.99, 4)], ids=["small ratio", "large ratio"])
def test_both_sides_of_the_split_have_at_least_one_row(tmp_path: Path, ratio: float, held_out_count: int) -> None:
    train, evaluation = hold_out_rows(build_dataset(tmp_path, list(range(5))), ratio, seed=1)

    assert (len(train), len(evaluation)) == (5 - held_out_count, held_out_count)


def test_a_dataset_with_one_row_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="splitDatasetRatio: a split needs at least two different rows"):
        hold_out_rows(build_dataset(tmp_path, [1, 1, 1]), 0.5, seed=1)
