"""Tokenised rows on disk, memory-mapped: what training reads."""

import copy
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from finetune_trainer.data.media_store import Album
from finetune_trainer.data.row_filter import Counted
from finetune_trainer.data.row_origins import Places
from finetune_trainer.data_sources.media import Picture

IGNORED = -100  # the label of a token that is not learned
FILLER = -1

Features = dict[str, torch.Tensor]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class TokenDataset(Dataset[tuple[Features, ...]]):
    """Rows by index, each a tuple of sequences. A filler's sequences teach nothing."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.counted = Counted.from_json(meta["counted"])
        self._sequences: int = meta["sequences"]
        self._weighted: bool = meta["weighted"]
        self._ends = np.load(folder / "ends.npy")
        self._places = Places(tuple(meta["sources"]), np.load(folder / "places.npy"))
        self._tokens = _map(folder / "tokens.bin", np.int32)
        self._weights = _map(folder / "weights.bin", np.float32)
        self.album = Album(folder)
        self._rows: Numbers = np.arange(len(self._ends) // self._sequences)

    def only(self, rows: Numbers) -> "TokenDataset":
        """Some of the rows, as a dataset of their own."""
        chosen = copy.copy(self)
        chosen._rows = self._rows[rows]
        return chosen

    @property
    def lengths(self) -> Numbers:
        """Tokens of each row's longest sequence."""
        longest: Numbers = self._all_lengths().max(axis=1)
        return longest

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return int(self._all_lengths().sum())

    def count(self, tokens: Collection[int]) -> Numbers:
        """How many of these each row has, in the sequence that has most."""
        starts = np.concatenate(([0], self._ends[:-1]))
        found = np.add.reduceat(np.isin(self._tokens, list(tokens)), starts, dtype=np.int64)
        most: Numbers = found.reshape(-1, self._sequences)[self._rows].max(axis=1)
        return most

    @property
    def origins(self) -> Numbers:
        """Equal where a row was taken more than once."""
        return self._places.numbers[self._rows]

    def place(self, index: int) -> str:
        """How a message names the row."""
        return self._places[int(self._rows[index])]

    def pictures(self, index: int) -> tuple[tuple[Picture, ...], ...]:
        """What each of the row's sequences shows."""
        if index == FILLER:
            return ((),) * self._sequences
        first = int(self._rows[index]) * self._sequences
        return tuple(self.album[first + number] for number in range(self._sequences))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        if index == FILLER:
            return (self._features(torch.zeros(1, dtype=torch.int64), torch.zeros(1)),) * self._sequences
        first = int(self._rows[index]) * self._sequences
        return tuple(self._sequence(first + number) for number in range(self._sequences))

    def _sequence(self, number: int) -> Features:
        start, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        tokens = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        return self._features(tokens, torch.from_numpy(self._weights[start:end].copy()))

    def _features(self, tokens: torch.Tensor, weights: torch.Tensor) -> Features:
        """Weights only where some are neither 0 nor 1."""
        features = {"input_ids": tokens, "labels": tokens.masked_fill(weights == 0, IGNORED)}
        return {**features, "weights": weights} if self._weighted else features

    def _all_lengths(self) -> Numbers:
        """(rows, sequences)."""
        lengths: Numbers = np.diff(self._ends, prepend=0).reshape(-1, self._sequences)[self._rows]
        return lengths


def _map(path: Path, dtype: type[np.generic]) -> "np.ndarray[Any, Any]":
    """An empty file cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
