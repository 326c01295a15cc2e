"""Errors of data files, data loaders and configuration files."""

import argparse
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, random_split


def _write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _read_truncated_image(folder: Path) -> None:
    path = folder / "a.png"
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64), dtype=numpy.uint8)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    Image.open(path).load()


def _read_page_as_image(folder: Path) -> None:
    _write(folder, "a.jpg", "<html></html>")
    Image.open("a.jpg")


def _load_object_array(folder: Path) -> None:
    numpy.savez(folder / "a.npz", rows=numpy.array([{}], dtype=object))
    numpy.load(folder / "a.npz")["rows"]


def _query_missing_table(folder: Path) -> None:
    sqlite3.connect(folder / "metrics.db").execute("select * from samples")


def _read_ragged_csv(folder: Path) -> None:
    import pandas  # type: ignore[import-untyped]

    pandas.read_csv(_write(folder, "a.csv", "a,b\n1,2\n1,2,3\n"))


def _read_missing_column(folder: Path) -> None:
    import pandas

    pandas.read_csv(_write(folder, "a.csv", "a,b\n1,2\n"))["text"]


def _read_csv_as_parquet(folder: Path) -> None:
    import pyarrow.parquet

    _write(folder, "z.parquet", "a,b\n1,2\n" * 10)
    pyarrow.parquet.read_table("z.parquet")


def _read_missing_field(folder: Path) -> None:
    import pyarrow

    pyarrow.table({"a": [1]}).column("text")


def _convert_mixed_types(folder: Path) -> None:
    import pyarrow

    pyarrow.array([1, "a"])


def _recurse(depth: int = 0) -> int:
    return _recurse(depth + 1)


def _raise_for_empty_loader(folder: Path) -> None:
    batches: list[float] = []
    for batch in batches:
        loss = batch
    print(loss)


class _Rows(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return int({"b": 1}["a"])


def _rows() -> Iterator[int]:
    yield 1


def _copy_generator(folder: Path) -> None:
    import copy

    copy.deepcopy(_rows())


ROWS: Any = _Rows()

PROVOCATIONS: dict[str, Callable[[Path], object]] = {
    "trailing comma in train.jsonl": lambda folder: json.loads('{"prompt": "a",}'),
    "two documents on one line": lambda folder: json.loads('{"a": 1}{"a": 2}'),
    "non-UTF8 corpus file opened as text": lambda folder: _write(folder, "a.txt", b"caf\xe9").read_text("utf-8"),
    "runaway recursion in a preprocessing function": lambda folder: _recurse(),
    "loss never bound as loader was empty": _raise_for_empty_loader,
    "mean of no kept samples in a loss": lambda folder: sum([]) / len([]),
    "missing env variable": lambda folder: os.environ["DATA_DIR"],
    "MAX_STEPS=1k in the environment": lambda folder: int("1k"),
    "misspelt variable in training step": lambda folder: modle,  # type: ignore[name-defined] # noqa: F821
    "unknown option in argparse": lambda folder: argparse.ArgumentParser().parse_args(["--unknown"]),
    "tabs in config": lambda folder: yaml.safe_load("a:\n\t- b\n"),
    "preprocess script exits 2": lambda folder: subprocess.run(
        ["ls", "/no/such/dir"], check=True, stderr=subprocess.DEVNULL
    ),
    "sqlite path not there": lambda folder: sqlite3.connect(folder / "no" / "metrics.db"),
    "sqlite without the table": _query_missing_table,
    "ragged csv": _read_ragged_csv,
    "csv column absent": _read_missing_column,
    "csv renamed parquet": _read_csv_as_parquet,
    "absent column in parquet": _read_missing_field,
    "mixed types into arrow": _convert_mixed_types,
    "half a png": _read_truncated_image,
    "HTML saved as jpg": _read_page_as_image,
    "npz saved as objects": _load_object_array,
    "ragged list to array": lambda folder: numpy.array([[1, 2], [1]]),
    "broadcast in metric": lambda folder: numpy.ones(3) + numpy.ones(4),
    "TensorDataset size mismatch": lambda folder: TensorDataset(torch.ones(2), torch.ones(3)),
    "empty dataset with shuffle": lambda folder: DataLoader(TensorDataset(torch.ones(0)), shuffle=True),
    "default collate of dicts lacking keys": lambda folder: default_collate([{"a": 1}, {"b": 1}]),
    "default collate of None samples": lambda folder: default_collate([None]),
    "default collate of string/int lists of unequal lengths": lambda folder: default_collate([[1, 2], [1]]),
    "stack of unpadded sequences in collate": lambda folder: default_collate([torch.ones(3), torch.ones(4)]),
    "random_split of wrong sum": lambda folder: random_split(ROWS, [2, 2]),
    "negative prefetch without workers": lambda folder: DataLoader(ROWS, prefetch_factor=2),
    "sampler and shuffle together": lambda folder: DataLoader(ROWS, shuffle=True, sampler=[0]),
    "generator dataset pickled to spawned worker": _copy_generator,
    "KeyError in __getitem__ in a worker": lambda folder: list(DataLoader(ROWS, num_workers=1)),
}
