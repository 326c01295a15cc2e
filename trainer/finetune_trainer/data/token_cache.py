"""Cache of tokenized rows, which one process per job writes and every rank reads."""

import hashlib
import json
import secrets
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, astuple
from enum import Enum, auto
from pathlib import Path, PurePath

import numpy as np

from finetune_supervisor.contract import parse_json
from finetune_trainer.atomic_files import fsync_folder, fsync_tree, remove_path, write_json
from finetune_trainer.checksums import find_damage, record_file, seal
from finetune_trainer.data.media_store import MediaStoreWriter
from finetune_trainer.data.row_filter import RowFilter, RowRules
from finetune_trainer.data.row_rendering import RenderedRow
from finetune_trainer.data.token_dataset import META_FILE, TokenDataset
from finetune_trainer.data_sources.file_digests import FileDigest, compute_file_digest
from finetune_trainer.data_sources.row_origins import RowOriginWriter
from finetune_trainer.errors import DatasetError, TrainerError, first_line
from finetune_trainer.foreign_files import read_regular_file

_FORMAT = 7
_TOKENS_FILE = "tokens.bin"
_PROGRESS_FILE = "progress.bin"
MAX_COMPARED_BYTES = 2**30  # larger datasets are compared with their digests in the background
_POLL_SECONDS = 0.1
_MAX_UNUSED_SECONDS = 30 * 86_400.0  # a job that runs for longer and loses its entry tokenizes the rows again
TAKEOVER_SECONDS = 60.0  # time without progress after which a deputy writes; network file systems report sizes late

RenderedRows = Iterable[RenderedRow | TrainerError]


class CacheRole(Enum):
    """What a process does if the cache is empty."""

    WRITER = auto()  # verifies the entry of the cache, or tokenizes the rows
    DEPUTY = auto()  # waits for the writer, and does its work if it makes no progress
    READER = auto()  # waits


def compute_cache_key(files: Sequence[Path], *parameters: object) -> str:
    """Return a hash of the tokenization parameters and of the paths, sizes and modification times of the files."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([_FORMAT, stats, parameters]).encode()).hexdigest()[:32]


def load_or_tokenize(  # noqa: PLR0913  each is independent of the others
    folder: Path,
    render_rows: Callable[[], RenderedRows],
    *,
    rules: RowRules,
    role: CacheRole,
    send_heartbeat: Callable[[], None],
    files: Sequence[Path] = (),
    tokenization: Mapping[str, str] = {},
    former: tuple[Path, str] | None = None,
    job_uid: str = "",
    attempt: int = 0,
) -> TokenDataset:
    """Load the cached rows. The writer verifies them, or tokenizes the rows; the other processes wait.

    A deputy does so if the writer makes no progress, for example because the storage is not shared. Waiting has no
    timeout: if the process that writes fails, the supervisor terminates the waiting processes.
    folder: the entry of the cache. If it cannot be used, it stays for other jobs, and the new one gets a longer name.
    The writer deletes what is older than _MAX_UNUSED_SECONDS: entries that cannot be used, and files of other writers.
    files: the files of the rows, whose digests are stored with the rows.
    tokenization: what tokens depend on apart from the files; stored with the rows, too.
    former: an entry to use instead if it is intact, and the digest that its rows must have, empty if any.
    Raises: DatasetError if a file changes meanwhile, or an error of `render_rows`.
    """
    note = folder.with_name(f".{folder.name}-{job_uid}-{attempt}.json")  # contains the name of the entry
    if role is CacheRole.DEPUTY:
        _wait_for_writer(folder, note, send_heartbeat)
    if role is CacheRole.WRITER or (role is CacheRole.DEPUTY and not note.exists()):
        entry = _find_or_write(
            folder, render_rows, files, former, tokenization=tokenization, rules=rules, send_heartbeat=send_heartbeat
        )
        write_json(note, entry.name)
    while not note.exists():
        send_heartbeat()
        time.sleep(_POLL_SECONDS)
    return TokenDataset(folder.with_name(PurePath(parse_json(read_regular_file(note))).name))


def _wait_for_writer(folder: Path, note: Path, send_heartbeat: Callable[[], None]) -> None:
    """Wait until the note exists, or until the temporary folders have not grown for some time."""
    written_bytes, last_progress = _measure_progress(folder), time.monotonic()
    while not note.exists() and time.monotonic() - last_progress < TAKEOVER_SECONDS:
        time.sleep(_POLL_SECONDS)
        if (size := _measure_progress(folder)) != written_bytes:
            written_bytes, last_progress = size, time.monotonic()
            send_heartbeat()


def _measure_progress(folder: Path) -> int:
    """Return the bytes that all processes have written for the cache; folders may vanish meanwhile."""
    total = 0
    for name in (_TOKENS_FILE, _PROGRESS_FILE):
        for file in folder.parent.glob(f".{folder.name}-*/{name}"):
            with suppress(OSError):
                total += file.stat().st_size
    return total


def _find_or_write(  # noqa: PLR0913  each is independent of the others
    folder: Path,
    render_rows: Callable[[], RenderedRows],
    files: Sequence[Path],
    former: tuple[Path, str] | None,
    *,
    tokenization: Mapping[str, str],
    rules: RowRules,
    send_heartbeat: Callable[[], None],
) -> Path:
    """Return an intact entry, or write one to a temporary folder, which is renamed at the end."""
    _remove_old(folder.parent.glob(".*"))
    token = secrets.token_hex(8)
    temporary = folder.with_name(f".{folder.name}-{token}")
    temporary.mkdir(parents=True)
    try:
        with (temporary / _PROGRESS_FILE).open("wb", buffering=0) as progress:

            def report_progress() -> None:
                send_heartbeat()
                progress.write(b".")  # the file grows, so that no deputy takes over

            is_small = sum(file.stat().st_size for file in files) <= MAX_COMPARED_BYTES
            before = _compute_digests(files, report_progress) if is_small else None
            for place, digest in filter(None, (former, (folder, ""))):
                if entry := _find_intact_entry(place, digest, before, report_progress=report_progress):
                    return entry
            entry = folder.with_name(f"{folder.name}-{token}") if folder.exists() else folder
            meta = _write_files(temporary, render_rows(), rules=rules, send_heartbeat=send_heartbeat)
            digests = _compute_digests(files, report_progress)
            if before not in (None, digests):
                raise DatasetError(f"{files[0].parent}: a file changed while its rows were read; start again")
            written = [file for file in temporary.iterdir() if file.name != _PROGRESS_FILE]
            records = {file.name: astuple(record_file(file, report_progress=report_progress)) for file in written}
        (temporary / _PROGRESS_FILE).unlink()
        meta |= {"files": [asdict(digest) for digest in digests], "records": records, "tokenization": tokenization}
        write_json(temporary / META_FILE, seal(meta))
        fsync_tree(temporary)
        try:
            temporary.rename(entry)
        except OSError:
            if not entry.exists():  # otherwise, another job has written the same rows
                raise
        fsync_folder(folder.parent)
        return entry
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _compute_digests(files: Sequence[Path], report_progress: Callable[[], None]) -> tuple[FileDigest, ...]:
    return tuple(compute_file_digest(file, report_progress=report_progress) for file in files)


def _find_intact_entry(
    folder: Path, digest: str, sources: tuple[FileDigest, ...] | None, *, report_progress: Callable[[], None]
) -> Path | None:
    """Return an entry that can be used, if any.

    digest: that of its rows; empty for any. sources: digests of the source files now; None if they are not compared.
    """
    for entry in sorted(folder.parent.glob(f"{folder.name}*"), reverse=True):
        try:
            rows = TokenDataset(entry)
            problem = "the checkpoints have other rows" if digest not in ("", rows.content_digest) else None
            if sources not in (None, rows.files):
                problem = "its source files have changed"
            for name, record in () if problem else rows.records.items():
                if damage := find_damage(entry / name, record, report_progress=report_progress):
                    problem = f"{name} {damage}"
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
            problem = first_line(error)
        if problem is None:
            return entry
        print(f"token cache: {entry} is not used, because {problem}", flush=True)
        _remove_old([entry])
    return None


def _remove_old(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # another job may delete it as well
            if time.time() - path.stat().st_mtime > _MAX_UNUSED_SECONDS:
                remove_path(path)


def start_source_check(datasets: Iterable[TokenDataset]) -> Future[None]:
    """Compare large source files with the digests of their rows in a thread, because that takes long.

    The result raises DatasetError after a change, or OSError if a file cannot be read.
    """
    files = {rows.folder: rows.files for rows in datasets}
    large = [folder for folder in files if sum(file.size_bytes for file in files[folder]) > MAX_COMPARED_BYTES]
    expected = [(folder, file, Path(file.path).stat().st_mtime_ns) for folder in large for file in files[folder]]
    check: Future[None] = Future()
    threading.Thread(target=_compare_sources, args=(expected, check), name="source check", daemon=True).start()
    return check


def _compare_sources(expected: Iterable[tuple[Path, FileDigest, int]], check: Future[None]) -> None:
    try:
        for entry, file, time_ns in expected:
            with suppress(FileNotFoundError):  # the rows of a deleted file can only be read from the entry
                found = compute_file_digest(Path(file.path), report_progress=lambda: None)
                if found == file or Path(file.path).stat().st_mtime_ns != time_ns:  # it changed after it was read
                    continue
                (entry / META_FILE).unlink()  # the next job tokenizes the rows again
                raise DatasetError(
                    f"{file.path} has changed without a new modification time since its rows were tokenized"
                    f" (sha256 {found.sha256}, was {file.sha256}): this job trained on the old rows, in {entry};"
                    " create a job with another output.subPath, which reads the file again"
                )
        check.set_result(None)
    except Exception as error:
        check.set_exception(error)


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
