"""Tokenised samples on disk, memory-mapped: one process per node writes them, every rank reads them."""

import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from finetune_trainer.data.render import Sample

_FORMAT = 2
_NAMED = 10  # dropped samples that a message names
IGNORED = -100  # the label of a token that is not learned

Features = dict[str, torch.Tensor]
Row = tuple[Sample, ...]  # one sequence, or the chosen and the rejected one of a pair


@dataclass(frozen=True)
class Counted:
    """What became of the rows."""

    rows: int
    kept: int
    tokens: int
    too_long: tuple[str, ...]  # the first few, each with its length
    nothing_to_learn: int

    @property
    def dropped(self) -> int:
        return self.rows - self.kept


class TokenDataset(Dataset[tuple[Features, ...]]):
    """Rows by index, each a tuple of sequences. Index -1 is a filler whose sequences teach nothing."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.counted = Counted(**{**meta["counted"], "too_long": tuple(meta["counted"]["too_long"])})
        self._sequences: int = meta["sequences"]
        self._weighted: bool = meta["weighted"]
        self._ends = np.load(folder / "ends.npy")
        self._tokens = _map(folder / "tokens.bin", np.int32)
        self._weights = _map(folder / "weights.bin", np.float32)

    def __len__(self) -> int:
        return len(self._ends) // self._sequences

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        if index == -1:
            return (self._features(torch.zeros(1, dtype=torch.int64), torch.zeros(1)),) * self._sequences
        return tuple(self._sequence(index * self._sequences + number) for number in range(self._sequences))

    def _sequence(self, number: int) -> Features:
        start, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        tokens = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        return self._features(tokens, torch.from_numpy(self._weights[start:end].copy()))

    def _features(self, tokens: torch.Tensor, weights: torch.Tensor) -> Features:
        """Weights only where some are neither 0 nor 1."""
        features = {"input_ids": tokens, "labels": tokens.masked_fill(weights == 0, IGNORED)}
        return {**features, "weights": weights} if self._weighted else features


def _map(path: Path, dtype: type[np.generic]) -> "np.ndarray[Any, Any]":
    """An empty file cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


def cache_key(files: Sequence[Path], *, tokenizer: str, method: str, max_length: int | None) -> str:
    """Changes with the files, the tokenizer (its serialised form and chat template), what is learned, and the limit."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    described = json.dumps([_FORMAT, stats, tokenizer, method, max_length])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def obtain_tokens(
    folder: Path,
    rows: Callable[[], Iterable[Row]],
    *,
    max_length: int | None,
    writes: bool,
    alive: Callable[[], None],
) -> TokenDataset:
    """The cached rows. Where they are not there yet, the process that `writes` makes them and the others wait.

    The waiting have no deadline: if the writer fails, torchrun ends them with it.
    """
    if writes:
        if not folder.exists():
            _write(folder, rows(), max_length=max_length, alive=alive)
        alive()
    while not folder.exists():
        time.sleep(0.1)
    return TokenDataset(folder)


def _write(folder: Path, rows: Iterable[Row], *, max_length: int | None, alive: Callable[[], None]) -> None:
    """Beside, then renamed. Another node may win the race with the same content; then ours is dropped."""
    beside = folder.with_name(f".{folder.name}-{os.uname().nodename}-{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        meta = _write_files(beside, rows, max_length=max_length, alive=alive)
        (beside / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        beside.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_files(
    folder: Path, rows: Iterable[Row], *, max_length: int | None, alive: Callable[[], None]
) -> dict[str, object]:
    """Tokens, weights and the ends of the sequences; gives what else there is to know of them."""
    ends, total, read, nothing_to_learn, sequences, weighted = array("q"), 0, 0, 0, 1, False
    too_long: list[str] = []
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "weights.bin").open("wb") as weights_file:
        for row in rows:
            read += 1
            if read % 256 == 0:
                alive()
            longest = max(len(sample.tokens) for sample in row)
            if max_length is not None and longest > max_length:
                too_long.append(f"{row[0].place} ({longest})")
                continue
            if not all(any(sample.weights) for sample in row):
                nothing_to_learn += 1
                continue
            sequences = len(row)
            for sample in row:
                weights = np.asarray(sample.weights, dtype=np.float32)
                weighted = weighted or bool(((weights != 0) & (weights != 1)).any())
                tokens_file.write(np.asarray(sample.tokens, dtype=np.int32).tobytes())
                weights_file.write(weights.tobytes())
                total += len(sample.tokens)
                ends.append(total)
    np.save(folder / "ends.npy", np.frombuffer(ends, dtype=np.int64) if ends else np.zeros(0, dtype=np.int64))
    more = (f"and {len(too_long) - _NAMED} more",) if len(too_long) > _NAMED else ()
    counted = Counted(
        rows=read,
        kept=len(ends) // sequences,
        tokens=total,
        too_long=(*too_long[:_NAMED], *more),
        nothing_to_learn=nothing_to_learn,
    )
    return {"counted": asdict(counted), "sequences": sequences, "weighted": weighted}
