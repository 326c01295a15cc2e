"""Stores the origin of every row, such as `/data/train.jsonl line 17`, in eight bytes per row."""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NUMBER_BITS = 40  # low bits: line or row number; high bits: index in `sources`


@dataclass(frozen=True)
class RowOrigins:
    """Row origins, indexed by row; the text before the number is stored once per file."""

    sources: tuple[str, ...]  # such as `/data/train.jsonl line`
    numbers: NDArray[np.int64]

    def __getitem__(self, index: int) -> str:
        source, number = divmod(int(self.numbers[index]), 1 << _NUMBER_BITS)
        return f"{self.sources[source]} {number}"


class RowOriginWriter:
    """Records the file and the line or row number of each row."""

    def __init__(self) -> None:
        self._sources: dict[str, int] = {}
        self._numbers = array("q")

    def add(self, origin: str) -> None:
        """Append the origin of the next row, which ends with a space and a number."""
        source, _, number = origin.rpartition(" ")
        source_index = self._sources.setdefault(source, len(self._sources))
        self._numbers.append(source_index << _NUMBER_BITS | int(number))

    def finish(self) -> RowOrigins:
        """Return the recorded origins in order."""
        return RowOrigins(tuple(self._sources), np.array(self._numbers, dtype=np.int64))
