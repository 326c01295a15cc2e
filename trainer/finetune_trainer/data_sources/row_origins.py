"""Stores the origin of every row, such as `/data/train.jsonl line 17`, in eight bytes per row."""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# number of low bits that contain the line or row number; the high bits contain the index in `prefixes`
_NUMBER_BITS = 40


@dataclass(frozen=True)
class RowOrigins:
    """Origins of rows, indexed by row; the text before the line number is stored once per file."""

    prefixes: tuple[str, ...]  # origins without line or row numbers, such as `/data/train.jsonl line`
    numbers: NDArray[np.int64]  # index in `prefixes` and line or row number of each row

    def __getitem__(self, index: int) -> str:
        prefix_index, number = divmod(int(self.numbers[index]), 1 << _NUMBER_BITS)
        return f"{self.prefixes[prefix_index]} {number}"


class RowOriginWriter:
    """Records the file and the line or row number of each row."""

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}
        self._numbers = array("q")

    def add(self, origin: str) -> None:
        """Append the origin of the next row; an origin must end with a space and a number."""
        prefix, _, number = origin.rpartition(" ")
        prefix_index = self._prefixes.setdefault(prefix, len(self._prefixes))
        self._numbers.append(prefix_index << _NUMBER_BITS | int(number))

    def finish(self) -> RowOrigins:
        """Return the origins in the order in which they were added."""
        return RowOrigins(tuple(self._prefixes), np.array(self._numbers, dtype=np.int64))
