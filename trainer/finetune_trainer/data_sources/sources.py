"""Reads the rows of a dataset's sources: all rows, or 1000 randomly drawn rows for `name#1000`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.data_sources.readers import Row, count_rows, read_rows
from finetune_trainer.data_sources.source_files import DownloadSettings, find_files
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class RowSource:
    """Files of a source, and the number of rows to draw from them; None reads each row once."""

    files: tuple[Path, ...]
    rows: int | None


def find_sources(sources: Sequence[DatasetSource], downloads: DownloadSettings, *, field: str) -> tuple[RowSource, ...]:
    """Find or download the files of each source; `field` is the list in the spec, for error messages.

    Raises: DatasetError or HubUnavailable.
    """
    return tuple(
        RowSource(find_files(source, downloads, field=f"{field}[{index}].name"), source.rows)
        for index, source in enumerate(sources)
    )


def read_sources(sources: Sequence[RowSource], *, seed: int) -> Iterator[tuple[Row | DatasetError, int]]:
    """Yield each drawn row, or its error, and the number of times it was drawn.

    Rows are ordered by source, file and line.
    """
    for index, source in enumerate(sources):
        rows = (row for file in source.files for row in read_rows(file))
        if source.rows is None:
            yield from ((row, 1) for row in rows)
            continue
        counts = draw_row_counts(sum(map(count_rows, source.files)), source.rows, seed=(seed, index, 1))
        yield from ((row, int(count)) for row, count in zip(rows, counts, strict=True) if count)


def draw_row_counts(size: int, draws: int, *, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the number of draws of each row, (size,); the counts differ by at most 1."""
    if size == 0:
        return np.zeros(0, dtype=np.int64)
    base_count, remainder = divmod(draws, size)
    counts = np.full(size, base_count, dtype=np.int64)
    counts[np.random.default_rng(seed).permutation(size)[:remainder]] += 1
    return counts
