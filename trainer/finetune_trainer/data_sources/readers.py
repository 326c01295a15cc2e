"""Reads rows and their origins from .jsonl, .json, .csv and .parquet files."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from finetune_supervisor.contract import parse_json
from finetune_trainer.errors import DatasetError
from finetune_trainer.foreign_files import open_data_file
from finetune_trainer.storage_faults import check_is_about_content


@dataclass(frozen=True)
class Row:
    """Row of a file; its origin, such as `/data/train.jsonl line 17`, identifies it in messages."""

    origin: str
    columns: dict[str, object]

    @property
    def folder(self) -> Path:
        """Folder of the file, against which relative paths in the row are resolved."""
        return Path(self.origin.rsplit(" ", 2)[0]).parent


def read_rows(path: Path) -> Iterator[Row | DatasetError]:
    """Yield the rows of the file; a row that cannot be parsed yields a DatasetError.

    Raises: DatasetError if the rest of the file cannot be read.
    """
    try:
        yield from READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: expected UTF-8 text, found byte {error.object[error.start]:#04x}") from error
    except OSError as error:
        check_is_about_content(error, f"{path} cannot be read")
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error


def count_rows(path: Path) -> int:
    """Return the number of rows in the file, including those that cannot be parsed."""
    return sum(1 for _ in read_rows(path))


def _open_text(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_data_file(path), encoding="utf-8-sig", newline=newline)


def _read_jsonl(path: Path) -> Iterator[Row | DatasetError]:
    with _open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            origin = f"{path} line {number}"
            try:
                value = parse_json(line.rstrip())
            except json.JSONDecodeError as error:
                yield DatasetError(
                    f"{origin}, column {error.colno}: expected one JSON object, found a syntax error ({error.msg})"
                )
            else:
                yield _build_row(origin, value)


def _read_json(path: Path) -> Iterator[Row | DatasetError]:
    try:
        with _open_text(path) as file:
            rows = parse_json(file.read())
    except json.JSONDecodeError as error:
        raise DatasetError(
            f"{path} line {error.lineno}, column {error.colno}: expected a JSON array of objects,"
            f" found a syntax error ({error.msg})"
        ) from error
    if not isinstance(rows, list):
        raise DatasetError(
            f"{path}: expected a JSON array of objects, found {describe_value(rows)}; one object per line is .jsonl"
        )
    for number, value in enumerate(rows, start=1):
        yield _build_row(f"{path} row {number}", value)


def _read_csv(path: Path) -> Iterator[Row | DatasetError]:
    with _open_text(path, newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            for cells in reader:
                if not cells:
                    continue
                origin = f"{path} line {reader.line_num}"
                if len(cells) == len(header):
                    yield Row(origin, dict(zip(header, cells, strict=True)))
                else:
                    yield DatasetError(f"{origin}: expected {len(header)} cells as in the header, found {len(cells)}")
        except csv.Error as error:
            raise DatasetError(
                f"{path} line {reader.line_num}: expected CSV, found a syntax error ({error})"
            ) from error


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        number = 0
        with open_data_file(path) as file:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", {name: _drop_nulls(value) for name, value in columns.items()})
    except pa.ArrowException as error:
        raise DatasetError(f"{path}: expected a Parquet file, found: {error}") from error


def _drop_nulls(value: object) -> object:
    """Remove keys without a value from objects: a Parquet column gives every object all keys of the column."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


READERS: dict[str, Callable[[Path], Iterator[Row | DatasetError]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


_TYPE_NAMES: dict[type, str] = {
    type(None): "nothing",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def describe_value(value: object) -> str:
    """Return the type of a value for error messages, followed by the value as JSON if it is short."""
    type_name = _TYPE_NAMES.get(type(value), type(value).__name__)
    as_json = json.dumps(value, ensure_ascii=False, default=str)
    return type_name if value is None or len(as_json) > 60 else f"{type_name} ({as_json})"


def _build_row(origin: str, value: object) -> Row | DatasetError:
    if not isinstance(value, dict):
        return DatasetError(f"{origin}: expected a JSON object, found {describe_value(value)}")
    return Row(origin, value)
