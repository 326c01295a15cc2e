"""The cache of tokenised rows: one process per node writes them, every rank reads them."""

import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from finetune_trainer.data.media_store import AlbumWriter
from finetune_trainer.data.row_filter import Rendered, Rules, Sieve
from finetune_trainer.data.row_origins import PlaceBook
from finetune_trainer.data.token_dataset import TokenDataset
from finetune_trainer.errors import TrainerError

_FORMAT = 5

Rows = Iterable[Rendered | TrainerError]


def cache_key(files: Sequence[Path], *described: object) -> str:
    """Changes with the files, and with whatever else is told that decides about the tokens."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([_FORMAT, stats, described]).encode()).hexdigest()[:32]


def obtain_tokens(
    folder: Path, rows: Callable[[], Rows], *, rules: Rules, writes: bool, alive: Callable[[], None]
) -> TokenDataset:
    """The cached rows. Where they are not there yet, the process that `writes` makes them and the others wait.

    The waiting have no deadline: if the writer fails, torchrun ends them with it.
    """
    if writes:
        if not folder.exists():
            _write(folder, rows(), rules=rules, alive=alive)
        alive()
    while not folder.exists():
        time.sleep(0.1)
    return TokenDataset(folder)


def _write(folder: Path, rows: Rows, *, rules: Rules, alive: Callable[[], None]) -> None:
    """Beside, then renamed. Another node may win the race with the same content; then ours is dropped."""
    beside = folder.with_name(f".{folder.name}-{os.uname().nodename}-{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        meta = _write_files(beside, rows, rules=rules, alive=alive)
        (beside / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        beside.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_files(folder: Path, rows: Rows, *, rules: Rules, alive: Callable[[], None]) -> dict[str, object]:
    """Tokens, weights, places and the ends of the sequences; gives what else there is to know of them."""
    ends, total, sequences, weighted = array("q"), 0, 1, False
    sieve, places = Sieve(rules), PlaceBook()
    with (
        (folder / "tokens.bin").open("wb") as tokens_file,
        (folder / "weights.bin").open("wb") as weights_file,
        AlbumWriter(folder) as album,
    ):
        for number, row in enumerate(rows, start=1):
            if number % 256 == 0:
                alive()
            kept = sieve.keep(row)
            if kept is None:
                continue
            sequences = len(kept)
            places.add(kept[0].place)
            for sample in kept:
                weights = np.asarray(sample.weights, dtype=np.float32)
                weighted = weighted or bool(((weights != 0) & (weights != 1)).any())
                tokens_file.write(np.asarray(sample.tokens, dtype=np.int32).tobytes())
                weights_file.write(weights.tobytes())
                total += len(sample.tokens)
                ends.append(total)
                album.add(image.picture for image in sample.shown)
    written = places.places()
    np.save(folder / "ends.npy", np.array(ends, dtype=np.int64))
    np.save(folder / "places.npy", written.numbers)
    return {
        "counted": sieve.counted.as_json(),
        "sequences": sequences,
        "weighted": weighted,
        "sources": written.sources,
    }
