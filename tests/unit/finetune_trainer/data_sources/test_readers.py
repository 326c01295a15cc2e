"""Tests that all file formats yield the same rows and origins, and the errors for malformed files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_trainer.data_sources.readers import Row, count_rows, read_rows
from finetune_trainer.errors import DatasetError

ROWS = [{"prompt": "one", "completion": "1"}, {"prompt": "two", "completion": "2"}]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        path.write_text("prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_all_file_formats_yield_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"rows{suffix}", ROWS)

    assert [row.columns for row in read_rows(path) if isinstance(row, Row)] == ROWS
    assert count_rows(path) == 2


def test_keys_without_a_value_are_removed_from_objects_of_parquet_files(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"city": "Bern"}}, {"name": "g", "arguments": {"zone": "CET"}}]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"calls": calls, "note": None}]), path)

    (row,) = read_rows(path)

    assert isinstance(row, Row)
    assert row.columns == {"calls": calls, "note": None}


@pytest.mark.parametrize(
    ("suffix", "positions"),
    [(".jsonl", ["line 1", "line 3"]), (".json", ["row 1", "row 2"]), (".csv", ["line 2", "line 3"])],
)
def test_the_origin_of_a_row_contains_its_line_or_row_number(tmp_path: Path, suffix: str, positions: list[str]) -> None:
    path = write_rows(tmp_path / f"rows{suffix}", ROWS)

    assert [row.origin for row in read_rows(path) if isinstance(row, Row)] == [
        f"{path} {position}" for position in positions
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.json", '{"rows": []}', "r.json: expected a JSON array of objects, found an object"),
        ("r.json", "[\n{,}]", "r.json line 2, column 2: expected a JSON array of objects"),
        ("r.parquet", "not parquet", "r.parquet: expected a Parquet file"),
    ],
)
def test_the_error_for_a_malformed_file_contains_line_and_value(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(content)

    with pytest.raises(DatasetError) as raised:
        list(read_rows(path))

    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", '{"a": "1"}\n{"a": }\n{"a": "3"}\n', "r.jsonl line 2, column 7: expected one JSON object"),
        ("r.jsonl", '{"a": "1"}\n[1]\n{"a": "3"}\n', "r.jsonl line 2: expected a JSON object, found a list ([1])"),
        ("r.json", '[{"a": "1"}, 2, {"a": "3"}]', "r.json row 2: expected a JSON object, found a number (2)"),
        ("r.csv", "a\n1\n2,2\n3\n", "r.csv line 3: expected 1 cells as in the header, found 2"),
    ],
)
def test_reading_continues_after_a_bad_row(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)

    first_row, error, last_row = read_rows(path)

    assert isinstance(first_row, Row)
    assert isinstance(error, DatasetError)
    assert isinstance(last_row, Row)
    assert message in str(error)
    assert (first_row.columns, last_row.columns) == ({"a": "1"}, {"a": "3"})


def test_invalid_utf8_raises_a_dataset_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')

    with pytest.raises(DatasetError, match="expected UTF-8 text, found byte 0xff"):
        list(read_rows(path))
