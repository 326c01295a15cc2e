"""Where rows come from, such as `/data/train.jsonl line 17`, in eight bytes a row."""

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

_BITS = 40  # of the number; above them is that of the source


@dataclass(frozen=True)
class Places:
    """What a place begins with, such as `/data/train.jsonl line`, is kept once for all rows."""

    sources: tuple[str, ...]
    numbers: "np.ndarray[Any, np.dtype[np.int64]]"

    def __getitem__(self, row: int) -> str:
        source, number = divmod(int(self.numbers[row]), 1 << _BITS)
        return f"{self.sources[source]} {number}"


class PlaceBook:
    """Takes places down, one by one."""

    def __init__(self) -> None:
        self._sources: dict[str, int] = {}
        self._numbers = array("q")

    def add(self, place: str) -> None:
        """It ends with a number."""
        source, _, number = place.rpartition(" ")
        known = self._sources.setdefault(source, len(self._sources))
        self._numbers.append(known << _BITS | int(number))

    def places(self) -> Places:
        return Places(tuple(self._sources), np.array(self._numbers, dtype=np.int64))
