"""Reads the rows of dataset sources; a source `name#1000` yields 1000 randomly drawn rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.data_sources.readers import Row, count_rows, read_rows
from finetune_trainer.data_sources.source_files import find_files
from finetune_trainer.errors import DatasetError
from finetune_trainer.once_per_job import DownloadSettings


@dataclass(frozen=True)
class RowSource:
    """Files of a source and the number of rows to draw from them, or None to read each row once."""

    files: tuple[Path, ...]
    row_count: int | None


def find_sources(
    sources: Sequence[DatasetSource], downloads: DownloadSettings, *, spec_field: str
) -> tuple[RowSource, ...]:
    """Find or download the files of each source.

    spec_field: path of the list in the spec, for error messages. Raises: DatasetError or HubUnavailable.
    """
    return tuple(
        RowSource(find_files(source, downloads, spec_field=f"{spec_field}[{index}].name"), source.rows)
        for index, source in enumerate(sources)
    )


def read_sources(sources: Sequence[RowSource], *, seed: int) -> Iterator[tuple[Row | DatasetError, int]]:
    """Yield each drawn row, or its error, and the number of times it was drawn.

    Rows are ordered by source, file and line.
    """
    for index, source in enumerate(sources):
        rows = (row for file in source.files for row in read_rows(file))
        if source.row_count is None:
            yield from ((row, 1) for row in rows)
            continue
        counts = count_draws_per_row(sum(map(count_rows, source.files)), source.row_count, seed=(seed, index, 1))
        yield from ((row, int(count)) for row, count in zip(rows, counts, strict=True) if count)


def count_draws_per_row(row_count: int, draw_count: int, *, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return how many times each row is drawn, (row_count,); the counts differ by at most 1."""
    if row_count == 0:
        return np.zeros(0, dtype=np.int64)
    base_count, remainder = divmod(draw_count, row_count)
    counts = np.full(row_count, base_count, dtype=np.int64)
    counts[np.random.default_rng(seed).permutation(row_count)[:remainder]] += 1
    return counts
