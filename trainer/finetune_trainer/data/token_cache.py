"""Cache of tokenized rows, which one process per job writes and every rank reads."""

import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import Enum, auto
from pathlib import Path

import numpy as np

from finetune_trainer.data.media_store import MediaStoreWriter
from finetune_trainer.data.row_filter import RowFilter, RowRules
from finetune_trainer.data.row_rendering import RenderedRow
from finetune_trainer.data.token_dataset import TokenDataset
from finetune_trainer.data_sources.file_digests import compute_file_digest
from finetune_trainer.data_sources.row_origins import RowOriginWriter
from finetune_trainer.errors import TrainerError

_FORMAT = 7
_TOKENS_FILE = "tokens.bin"
_DIGEST_PROGRESS_FILE = "digest-progress.bin"
_POLL_SECONDS = 0.1
TAKEOVER_SECONDS = 60.0  # time without progress after which a deputy writes; network file systems report sizes late

RenderedRows = Iterable[RenderedRow | TrainerError]


class CacheRole(Enum):
    """What a process does if the cache is empty."""

    WRITER = auto()  # tokenizes the rows
    DEPUTY = auto()  # waits for the writer, and tokenizes the rows if it makes no progress
    READER = auto()  # waits


def compute_cache_key(files: Sequence[Path], *parameters: object) -> str:
    """Return a hash of the tokenization parameters and of the paths, sizes and modification times of the files."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([_FORMAT, stats, parameters]).encode()).hexdigest()[:32]


def load_or_tokenize(
    folder: Path,
    render_rows: Callable[[], RenderedRows],
    *,
    rules: RowRules,
    role: CacheRole,
    send_heartbeat: Callable[[], None],
    files: Sequence[Path] = (),
) -> TokenDataset:
    """Load the cached rows. If the cache is empty, the writer tokenizes the rows and the other processes wait.

    A deputy writes the cache if the writer makes no progress, for example because the storage is not shared. Waiting
    has no timeout: if the process that writes fails, the supervisor terminates the waiting processes.
    files: the files of the rows, whose digests are stored with the rows.
    """
    if role is CacheRole.DEPUTY and not folder.exists():
        _wait_for_writer(folder, send_heartbeat)
    if role is not CacheRole.READER:
        if not folder.exists():
            _write_cache(folder, render_rows(), files, rules=rules, send_heartbeat=send_heartbeat)
        send_heartbeat()
    while not folder.exists():
        time.sleep(_POLL_SECONDS)
    return TokenDataset(folder)


def _wait_for_writer(folder: Path, send_heartbeat: Callable[[], None]) -> None:
    """Wait until the cache exists, or until its temporary folders have not grown for some time."""
    written_bytes, last_progress = _measure_progress(folder), time.monotonic()
    while not folder.exists() and time.monotonic() - last_progress < TAKEOVER_SECONDS:
        time.sleep(_POLL_SECONDS)
        if (size := _measure_progress(folder)) != written_bytes:
            written_bytes, last_progress = size, time.monotonic()
            send_heartbeat()


def _measure_progress(folder: Path) -> int:
    """Return the bytes that all processes have written for the cache; folders may vanish meanwhile."""
    total = 0
    for name in (_TOKENS_FILE, _DIGEST_PROGRESS_FILE):
        for file in folder.parent.glob(f"{_build_temporary_prefix(folder)}*/{name}"):
            with suppress(OSError):
                total += file.stat().st_size
    return total


def _build_temporary_prefix(folder: Path) -> str:
    return f".{folder.name}-"


def _write_cache(
    folder: Path, rows: RenderedRows, files: Sequence[Path], *, rules: RowRules, send_heartbeat: Callable[[], None]
) -> None:
    """Write the cache to a temporary folder beside `folder`, then rename the temporary folder.

    If another node has already created `folder`, delete the temporary folder.
    """
    temporary = folder.with_name(f"{_build_temporary_prefix(folder)}{os.uname().nodename}-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        meta = _write_files(temporary, rows, rules=rules, send_heartbeat=send_heartbeat)
        meta["files"] = _compute_digests(files, temporary / _DIGEST_PROGRESS_FILE, send_heartbeat)
        (temporary / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _compute_digests(
    files: Sequence[Path], progress_file: Path, send_heartbeat: Callable[[], None]
) -> list[dict[str, object]]:
    """Return the digests of the files; the progress file grows meanwhile, so that no deputy takes over."""

    def report_progress() -> None:
        send_heartbeat()
        progress.write(b".")

    with progress_file.open("wb", buffering=0) as progress:
        digests = [asdict(compute_file_digest(file, report_progress=report_progress)) for file in files]
    progress_file.unlink()
    return digests


def _write_files(
    folder: Path, rows: RenderedRows, *, rules: RowRules, send_heartbeat: Callable[[], None]
) -> dict[str, object]:
    """Write all files of the cache except meta.json, and return the content of meta.json."""
    ends, total, sequences, weighted = array("q"), 0, 1, False
    row_filter, origins = RowFilter(rules), RowOriginWriter()
    with (
        (folder / _TOKENS_FILE).open("wb") as tokens_file,
        (folder / "weights.bin").open("wb") as weights_file,
        MediaStoreWriter(folder) as media,
    ):
        for number, row in enumerate(rows, start=1):
            if number % 256 == 0:
                send_heartbeat()
            samples = row_filter.apply(row)
            if samples is None:
                continue
            sequences = len(samples)
            origins.add(samples[0].origin)
            for sample in samples:
                weights = np.asarray(sample.weights, dtype=np.float32)
                weighted = weighted or bool(((weights != 0) & (weights != 1)).any())
                tokens_file.write(np.asarray(sample.input_ids, dtype=np.int32).tobytes())
                weights_file.write(weights.tobytes())
                total += len(sample.input_ids)
                ends.append(total)
                media.add(placeholder.item for placeholder in sample.placeholders)
    row_origins = origins.finish()
    np.save(folder / "ends.npy", np.array(ends, dtype=np.int64))
    np.save(folder / "places.npy", row_origins.numbers)
    return {
        "counted": row_filter.stats.as_json(),
        "sequences": sequences,
        "weighted": weighted,
        "sources": row_origins.prefixes,
    }
