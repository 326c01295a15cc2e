"""Tests that a source `name#1000` yields 1000 drawn rows, which depend on the seed."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.data_sources.sources import count_draws_per_row, find_sources, read_sources
from finetune_trainer.errors import DatasetError
from testing.fakes.downloads import NO_DOWNLOADS


def write_rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"n": f"{path.stem}{number}"}) + "\n" for number in range(count)))
    return path


def draw_rows(*names: str, seed: int = 1) -> list[tuple[object, int]]:
    sources = find_sources([DatasetSource(name=name) for name in names], NO_DOWNLOADS, spec_field="spec.dataset.train")
    return [(row.columns["n"], count) for row, count in read_sources(sources, seed=seed) if isinstance(row, Row)]


def test_a_source_without_a_row_count_yields_each_row_once_in_order(tmp_path: Path) -> None:
    assert draw_rows(str(write_rows(tmp_path / "b.jsonl", 2)), str(write_rows(tmp_path / "a.jsonl", 1))) == [
        ("b0", 1),
        ("b1", 1),
        ("a0", 1),
    ]


def test_rows_are_drawn_from_all_files_of_the_source(tmp_path: Path) -> None:
    for name in "ab":
        write_rows(tmp_path / f"{name}.jsonl", 50)

    drawn = [str(name) for name, count in draw_rows(f"{tmp_path}#20")]

    assert len(set(drawn)) == 20
    assert {name[0] for name in drawn} == {"a", "b"}
    assert drawn == sorted(drawn, key=lambda name: (name[0], int(name[1:])))


def test_the_seed_determines_which_rows_are_drawn(tmp_path: Path) -> None:
    name = f"{write_rows(tmp_path / 'rows.jsonl', 100)}#10"

    assert draw_rows(name) == draw_rows(name)
    assert draw_rows(name) != draw_rows(name, seed=2)


def test_drawing_more_rows_than_exist_repeats_rows(tmp_path: Path) -> None:
    drawn = draw_rows(f"{write_rows(tmp_path / 'rows.jsonl', 4)}#10")

    assert sum(count for _, count in drawn) == 10
    assert Counter(count for _, count in drawn) == {2: 2, 3: 2}


def test_draws_from_a_source_include_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[]\n")
    sources = find_sources(
        [DatasetSource(name=f"{tmp_path}/rows.jsonl#3")], NO_DOWNLOADS, spec_field="spec.dataset.train"
    )

    ((bad, count),) = read_sources(sources, seed=1)

    assert isinstance(bad, DatasetError)
    assert count == 3


@given(row_count=st.integers(1, 50), draw_count=st.integers(1, 200), seed=st.integers(0, 9))
def test_draw_counts_of_two_rows_differ_by_at_most_one(row_count: int, draw_count: int, seed: int) -> None:
    counts = count_draws_per_row(row_count, draw_count, seed=(seed,))

    assert counts.sum() == draw_count
    assert counts.max() - counts.min() <= 1


def test_no_rows_are_drawn_from_an_empty_source() -> None:
    assert count_draws_per_row(0, 5, seed=(1,)).tolist() == []


@pytest.mark.parametrize(
    ("name", "path", "rows"), [("/data/a", "/data/a", None), ("/data/a.csv#12", "/data/a.csv", 12)]
)
def test_the_row_count_is_parsed_from_the_source_name(name: str, path: str, rows: int | None) -> None:
    source = DatasetSource(name=name)

    assert (source.path, source.rows) == (path, rows)
