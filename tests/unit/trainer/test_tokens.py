import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_trainer.data.render import Sample
from finetune_trainer.data.tokens import IGNORED, Row, TokenDataset, cache_key, obtain_tokens

SAMPLES = [
    Sample("rows line 1", [5, 6, 7], [False, True, True]),
    Sample("rows line 2", [8, 9, 10, 11], [False, False, False, True]),
    Sample("rows line 3", [12, 13], [False, False]),
]


def obtain(folder: Path, *, max_length: int | None = None) -> TokenDataset:
    return obtain_tokens(
        folder, lambda: [(sample,) for sample in SAMPLES], max_length=max_length, writes=True, alive=lambda: None
    )


def test_samples_come_back_with_unlearned_tokens_ignored(tmp_path: Path) -> None:
    data = obtain(tmp_path / "key")

    assert len(data) == 2
    assert data[0][0]["input_ids"].tolist() == [5, 6, 7]
    assert data[0][0]["labels"].tolist() == [IGNORED, 6, 7]
    assert data[1][0]["labels"].tolist() == [IGNORED, IGNORED, IGNORED, 11]


def test_too_long_and_unlearnable_samples_are_counted_and_named(tmp_path: Path) -> None:
    counted = obtain(tmp_path / "key", max_length=3).counted

    assert (counted.rows, counted.kept, counted.dropped, counted.nothing_to_learn) == (3, 1, 2, 1)
    assert counted.too_long == ("rows line 2 (4)",)


def test_a_filler_teaches_nothing(tmp_path: Path) -> None:
    (filler,) = obtain(tmp_path / "key")[-1]

    assert filler["labels"].tolist() == [IGNORED]
    assert filler["input_ids"].shape == (1,)


def test_what_is_cached_is_not_rendered_again(tmp_path: Path) -> None:
    obtain(tmp_path / "key")

    def never() -> Iterator[Row]:
        raise AssertionError

    again = obtain_tokens(tmp_path / "key", never, max_length=None, writes=True, alive=lambda: None)

    assert len(again) == 2


def test_a_failed_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def breaks() -> Iterator[Row]:
        yield (SAMPLES[0],)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        obtain_tokens(tmp_path / "key", breaks, max_length=None, writes=True, alive=lambda: None)

    assert list(tmp_path.iterdir()) == []


def test_the_key_changes_with_file_tokenizer_method_and_limit(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    keys = {
        cache_key([file], tokenizer="a", method="sft", max_length=None),
        cache_key([file], tokenizer="b", method="sft", max_length=None),
        cache_key([file], tokenizer="a", method="sft", max_length=8),
        cache_key([file], tokenizer="a", method="dpo", max_length=None),
    }
    os.utime(file, ns=(1, 1))
    keys.add(cache_key([file], tokenizer="a", method="sft", max_length=None))

    assert len(keys) == 5


def test_a_pair_comes_back_as_two_sequences_and_is_dropped_as_one(tmp_path: Path) -> None:
    short, long = Sample("row 1", [1, 2], [0.0, 1.0]), Sample("row 2", [1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0])
    silent = Sample("row 3", [1, 2], [0.0, 0.0])
    rows = [(short, short), (short, long), (short, silent)]
    data = obtain_tokens(tmp_path / "key", lambda: rows, max_length=3, writes=True, alive=lambda: None)

    assert (len(data), len(data[0]), len(data[-1])) == (1, 2, 2)
    assert (data.counted.rows, data.counted.kept, data.counted.nothing_to_learn) == (3, 1, 1)
    assert data.counted.too_long == ("row 1 (4)",)


def test_weights_come_back_where_some_are_neither_nothing_nor_all(tmp_path: Path) -> None:
    weighted = [(Sample("row 1", [1, 2, 3], [0.0, 0.25, 1.0]),)]
    (features,) = obtain_tokens(tmp_path / "key", lambda: weighted, max_length=None, writes=True, alive=lambda: None)[0]

    assert features["weights"].tolist() == [0.0, 0.25, 1.0]
    assert features["labels"].tolist() == [IGNORED, 2, 3]
    assert "weights" not in obtain(tmp_path / "other")[0][0]
