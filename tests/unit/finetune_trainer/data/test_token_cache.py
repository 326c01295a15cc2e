import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from finetune_trainer.data.chat_template import Sample
from finetune_trainer.data.row_filter import Rendered, Rules
from finetune_trainer.data.token_cache import cache_key, obtain_tokens
from finetune_trainer.data.token_dataset import IGNORED, TokenDataset

SAMPLES = [
    Sample("rows line 1", [5, 6, 7], [0.0, 1.0, 1.0]),
    Sample("rows line 2", [8, 9, 10, 11], [0.0, 0.0, 0.0, 1.0]),
    Sample("rows line 3", [12, 13], [0.0, 0.0]),
]


def obtain(folder: Path, rows: Sequence[Rendered] | None = None, *, max_length: int | None = None) -> TokenDataset:
    rows = [(sample,) for sample in SAMPLES] if rows is None else rows
    return obtain_tokens(folder, lambda: rows, rules=Rules(max_length), writes=True, alive=lambda: None)


def test_samples_come_back_with_unlearned_tokens_ignored(tmp_path: Path) -> None:
    data = obtain(tmp_path / "key")

    assert len(data) == 2
    assert data[0][0]["input_ids"].tolist() == [5, 6, 7]
    assert data[0][0]["labels"].tolist() == [IGNORED, 6, 7]
    assert data[1][0]["labels"].tolist() == [IGNORED, IGNORED, IGNORED, 11]


def test_what_became_of_the_rows_comes_back(tmp_path: Path) -> None:
    obtain(tmp_path / "key", max_length=3)

    counted = TokenDataset(tmp_path / "key").counted

    assert (counted.rows, counted.kept) == (3, 1)
    assert counted.too_long.first == ("rows line 2 (4)",)
    assert counted.nothing_to_learn.first == ("rows line 3",)


def test_a_filler_teaches_nothing(tmp_path: Path) -> None:
    (filler,) = obtain(tmp_path / "key")[-1]

    assert filler["labels"].tolist() == [IGNORED]
    assert filler["input_ids"].shape == (1,)


def test_every_row_knows_its_length_and_its_place(tmp_path: Path) -> None:
    data = obtain(tmp_path / "key")

    assert data.lengths.tolist() == [3, 4]
    assert data.tokens == 7
    assert [data.place(0), data.place(1)] == ["rows line 1", "rows line 2"]


def test_some_of_the_rows_are_a_dataset_too(tmp_path: Path) -> None:
    data = obtain(tmp_path / "key")

    second = data.only(data.lengths.argsort()[1:])

    assert (len(second), second.place(0), second.lengths.tolist(), second.tokens) == (1, "rows line 2", [4], 4)
    assert second[0][0]["input_ids"].tolist() == [8, 9, 10, 11]
    assert second[-1][0]["input_ids"].tolist() == [0]
    assert len(data) == 2


def test_what_is_cached_is_not_rendered_again(tmp_path: Path) -> None:
    obtain(tmp_path / "key")

    def never() -> Iterator[Rendered]:
        raise AssertionError

    again = obtain_tokens(tmp_path / "key", never, rules=Rules(), writes=True, alive=lambda: None)

    assert len(again) == 2


def test_a_failed_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def breaks() -> Iterator[Rendered]:
        yield (SAMPLES[0],)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        obtain_tokens(tmp_path / "key", breaks, rules=Rules(), writes=True, alive=lambda: None)

    assert list(tmp_path.iterdir()) == []


def test_the_key_changes_with_the_file_and_with_all_that_is_described(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    keys = {cache_key([file], *described) for described in ([], ["a"], ["b"], ["a", 8], ["a", None])}
    os.utime(file, ns=(1, 1))
    keys.add(cache_key([file]))

    assert len(keys) == 6
    assert cache_key([file]) == cache_key([file])


def test_a_pair_comes_back_as_two_sequences(tmp_path: Path) -> None:
    chosen, rejected = Sample("row 1", [1, 2], [0.0, 1.0]), Sample("row 1", [1, 2, 3], [0.0, 1.0, 1.0])
    data = obtain(tmp_path / "key", [(chosen, rejected)])

    assert (len(data), len(data[0]), len(data[-1])) == (1, 2, 2)
    assert (data.lengths.tolist(), data.tokens) == ([3], 5)


def test_weights_come_back_where_some_are_neither_nothing_nor_all(tmp_path: Path) -> None:
    weighted = [(Sample("row 1", [1, 2, 3], [0.0, 0.25, 1.0]),)]
    (features,) = obtain(tmp_path / "key", weighted)[0]

    assert features["weights"].tolist() == [0.0, 0.25, 1.0]
    assert features["labels"].tolist() == [IGNORED, 2, 3]
    assert "weights" not in obtain(tmp_path / "other")[0][0]
