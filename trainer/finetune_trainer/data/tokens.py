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

_FORMAT = 1
_NAMED = 10  # dropped samples that a message names
IGNORED = -100  # the label of a token that is not learned

Features = dict[str, torch.Tensor]


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


class TokenDataset(Dataset[Features]):
    """Samples by index. Index -1 is a filler of one token that teaches nothing."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.counted = Counted(**{**meta, "too_long": tuple(meta["too_long"])})
        self._ends = np.load(folder / "ends.npy")
        self._tokens = _map(folder / "tokens.bin", np.int32)
        self._targets = _map(folder / "targets.bin", np.bool_)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Features:
        if index == -1:
            return {"input_ids": torch.zeros(1, dtype=torch.int64), "labels": torch.full((1,), IGNORED)}
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        tokens = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        targets = torch.from_numpy(self._targets[start:end].copy())
        return {"input_ids": tokens, "labels": tokens.masked_fill(~targets, IGNORED)}


def _map(path: Path, dtype: type[np.generic]) -> "np.ndarray[Any, Any]":
    """An empty file cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


def cache_key(files: Sequence[Path], *, tokenizer: str, max_length: int | None) -> str:
    """Changes with the files, the tokenizer (its serialised form and chat template) and the limit."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    described = json.dumps([_FORMAT, stats, tokenizer, max_length])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def obtain_tokens(
    folder: Path,
    samples: Callable[[], Iterable[Sample]],
    *,
    max_length: int | None,
    writes: bool,
    alive: Callable[[], None],
) -> TokenDataset:
    """The cached samples. Where they are not there yet, the process that `writes` makes them and the others wait.

    The waiting have no deadline: if the writer fails, torchrun ends them with it.
    """
    if writes:
        if not folder.exists():
            _write(folder, samples(), max_length=max_length, alive=alive)
        alive()
    while not folder.exists():
        time.sleep(0.1)
    return TokenDataset(folder)


def _write(folder: Path, samples: Iterable[Sample], *, max_length: int | None, alive: Callable[[], None]) -> None:
    """Beside, then renamed. Another node may win the race with the same content; then ours is dropped."""
    beside = folder.with_name(f".{folder.name}-{os.uname().nodename}-{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        counted = _write_files(beside, samples, max_length=max_length, alive=alive)
        (beside / "meta.json").write_text(json.dumps(asdict(counted)), encoding="utf-8")
        beside.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_files(
    folder: Path, samples: Iterable[Sample], *, max_length: int | None, alive: Callable[[], None]
) -> Counted:
    ends, total, rows, nothing_to_learn = array("q"), 0, 0, 0
    too_long: list[str] = []
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "targets.bin").open("wb") as targets_file:
        for sample in samples:
            rows += 1
            if rows % 256 == 0:
                alive()
            if max_length is not None and len(sample.tokens) > max_length:
                too_long.append(f"{sample.place} ({len(sample.tokens)})")
                continue
            if not any(sample.targets):
                nothing_to_learn += 1
                continue
            tokens_file.write(np.asarray(sample.tokens, dtype=np.int32).tobytes())
            targets_file.write(np.asarray(sample.targets, dtype=np.bool_).tobytes())
            total += len(sample.tokens)
            ends.append(total)
    np.save(folder / "ends.npy", np.frombuffer(ends, dtype=np.int64) if ends else np.zeros(0, dtype=np.int64))
    return Counted(
        rows=rows,
        kept=len(ends),
        tokens=total,
        too_long=(*too_long[:_NAMED], *((f"and {len(too_long) - _NAMED} more",) if len(too_long) > _NAMED else ())),
        nothing_to_learn=nothing_to_learn,
    )
