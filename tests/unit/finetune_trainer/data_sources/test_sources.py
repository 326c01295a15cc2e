"""`name#1000` takes 1000 rows of a source, the same ones for the same seed."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.data_sources.sources import draw, find_sources, read_sources
from finetune_trainer.errors import DatasetError
from testing.fakes.downloads import NONE


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"n": f"{path.stem}{number}"}) + "\n" for number in range(count)))
    return path


def taken(*names: str, seed: int = 1) -> list[tuple[object, int]]:
    sources = find_sources([DatasetSource(name=name) for name in names], NONE, field="spec.dataset.train")
    return [(row.columns["n"], times) for row, times in read_sources(sources, seed=seed) if isinstance(row, Row)]


def test_a_source_without_a_number_gives_each_row_once_in_order(tmp_path: Path) -> None:
    assert taken(str(write(tmp_path / "b.jsonl", 2)), str(write(tmp_path / "a.jsonl", 1))) == [
        ("b0", 1),
        ("b1", 1),
        ("a0", 1),
    ]


def test_a_sample_is_drawn_from_all_files_of_its_source(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", 50)

    drawn = [str(name) for name, times in taken(f"{tmp_path}#20")]

    assert len(set(drawn)) == 20
    assert {name[0] for name in drawn} == {"a", "b"}
    assert drawn == sorted(drawn, key=lambda name: (name[0], int(name[1:])))


def test_the_seed_decides_which_rows_are_drawn(tmp_path: Path) -> None:
    name = f"{write(tmp_path / 'rows.jsonl', 100)}#10"

    assert taken(name) == taken(name)
    assert taken(name) != taken(name, seed=2)


def test_more_rows_than_there_are_means_repeats(tmp_path: Path) -> None:
    drawn = taken(f"{write(tmp_path / 'rows.jsonl', 4)}#10")

    assert sum(times for _, times in drawn) == 10
    assert Counter(times for _, times in drawn) == {2: 2, 3: 2}


def test_a_bad_row_may_be_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[]\n")
    sources = find_sources([DatasetSource(name=f"{tmp_path}/rows.jsonl#3")], NONE, field="spec.dataset.train")

    ((bad, times),) = read_sources(sources, seed=1)

    assert isinstance(bad, DatasetError)
    assert times == 3


@given(size=st.integers(1, 50), wanted=st.integers(1, 200), seed=st.integers(0, 9))
def test_no_row_is_taken_more_than_once_more_often_than_another(size: int, wanted: int, seed: int) -> None:
    times = draw(size, wanted, seed=(seed,))

    assert times.sum() == wanted
    assert times.max() - times.min() <= 1


def test_of_no_rows_nothing_can_be_drawn() -> None:
    assert draw(0, 5, seed=(1,)).tolist() == []


@pytest.mark.parametrize(
    ("name", "path", "rows"), [("/data/a", "/data/a", None), ("/data/a.csv#12", "/data/a.csv", 12)]
)
def test_the_number_is_no_part_of_the_path(name: str, path: str, rows: int | None) -> None:
    source = DatasetSource(name=name)

    assert (source.path, source.rows) == (path, rows)
