"""The rows of a dataset's sources: all of a source once, or as many as its `name#1000` asks for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.data.token_dataset import Numbers
from finetune_trainer.data_sources.readers import Row, count_rows, read_rows
from finetune_trainer.data_sources.source_files import Downloads, find_files
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class Source:
    """The files of one source, and how many of their rows are taken; None takes each once."""

    files: tuple[Path, ...]
    rows: int | None


def find_sources(sources: Sequence[DatasetSource], downloads: Downloads, *, field: str) -> tuple[Source, ...]:
    return tuple(
        Source(find_files(source, downloads, field=f"{field}[{index}].name"), source.rows)
        for index, source in enumerate(sources)
    )


def read_sources(sources: Sequence[Source], *, seed: int) -> Iterator[tuple[Row | DatasetError, int]]:
    """Each row that is taken, or what is wrong with it, and how often it is taken. In order of sources and lines."""
    for index, source in enumerate(sources):
        read = (row for file in source.files for row in read_rows(file))
        if source.rows is None:
            yield from ((row, 1) for row in read)
            continue
        times = draw(sum(map(count_rows, source.files)), source.rows, seed=(seed, index, 1))
        yield from ((row, int(taken)) for row, taken in zip(read, times, strict=True) if taken)


def draw(size: int, wanted: int, *, seed: tuple[int, ...]) -> Numbers:
    """How often each of `size` rows is taken, as evenly as can be: more than there are means repeats."""
    if size == 0:
        return np.zeros(0, dtype=np.int64)
    rounds, rest = divmod(wanted, size)
    times = np.full(size, rounds, dtype=np.int64)
    times[np.random.default_rng(seed).permutation(size)[:rest]] += 1
    return times
