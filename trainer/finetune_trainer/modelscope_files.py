"""Lists and downloads the files of models and datasets on ModelScope, with its client (decisions/540)."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from modelscope_hub import HubApi, HubConfig
from modelscope_hub.errors import (
    AuthenticationError,
    FileDownloadError,
    HubError,
    InvalidParameter,
    NotExistError,
    PermissionDeniedError,
)
from pydantic import TypeAdapter
from requests import RequestException

from finetune_api.v1alpha1.name_types import COMMIT_PATTERN, HUB_ID_PATTERN
from finetune_trainer.atomic_files import check_no_links, translate_disk_errors, write_json
from finetune_trainer.errors import HubUnavailable, StorageFault, first_line
from finetune_trainer.foreign_files import read_regular_file
from finetune_trainer.storage_faults import is_storage_fault

MAIN_BRANCH = "master"
_NOT_READABLE = (AuthenticationError, PermissionDeniedError, NotExistError)


class MissingRepository(Exception):
    """The repository does not exist, or the token may not read it."""


class MissingRevision(Exception):
    """The repository exists, but it has no such branch, tag or commit."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository; `revision` is the commit that changed it last."""

    path: str
    size: int | None
    sha256: str  # empty if unknown
    revision: str


@dataclass(frozen=True)
class Snapshot:
    """All files of a repository at one revision.

    `commit` is the newest one that changed any of them, or a hash of the list if the list contains no commits.
    """

    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def folder_name(self) -> str:
        """Name of the folder for these files, which are the same in all snapshots with this name."""
        return f"{self.commit[:12]}-{_compute_hash(self.files)[:12]}"


_SNAPSHOT = TypeAdapter(Snapshot)


@dataclass(frozen=True)
class ModelScopeRepository:
    """A model or dataset on ModelScope; `cache` is the folder for its files and for lists of them."""

    kind: Literal["model", "dataset"]
    name: str
    cache: Path

    def __post_init__(self) -> None:
        """Check the id, which becomes a part of URLs and of a path below the cache. Raises: MissingRepository"""
        if not re.fullmatch(HUB_ID_PATTERN, self.name):
            raise MissingRepository("expected an id OWNER/NAME")

    def find_snapshot(self, revision: str | None) -> Snapshot:
        """Return the files of a branch, tag or commit, by default of the main branch.

        If ModelScope cannot be reached, return those that it listed last. The files of a commit never change, so that
        they are listed once. Raises: MissingRepository, MissingRevision, HubUnavailable, DiskFull or OutputError.
        """
        revision = revision or MAIN_BRANCH
        known_snapshot = _read_list(self._get_list_file(revision))
        if known_snapshot is not None and re.fullmatch(COMMIT_PATTERN, revision):
            return known_snapshot
        try:
            snapshot = self._list_files(revision)
        except HubUnavailable:
            if known_snapshot is None:
                raise
            return known_snapshot
        with translate_disk_errors(self.cache):
            write_json(self._get_list_file(revision), asdict(snapshot))
            if _read_list(self._get_list_file(snapshot.commit)) is None:  # its first list remains
                write_json(self._get_list_file(snapshot.commit), asdict(snapshot))
        return snapshot

    def find_snapshot_in(self, paths: str) -> Snapshot | None:
        """Return the snapshot whose folder is in a text with paths, if it was listed before."""
        snapshots = map(_read_list, self.cache.glob("files-*.json"))
        return next((each for each in snapshots if each is not None and each.folder_name in paths), None)

    def download(self, snapshot: Snapshot, paths: Iterable[str]) -> Path:
        """Download the missing ones of these files, check their SHA-256, and return their folder.

        Without a missing file there is no request. Raises: MissingRepository, HubUnavailable, DiskFull or OutputError.
        """
        # The path ends with the id, so that messages which contain the path also contain the id.
        folder, selected = self.cache / snapshot.folder_name / self.name, frozenset(paths)
        if unverified := [file.path for file in snapshot.files if file.path in selected and not file.sha256]:
            examples = ", ".join(unverified[:5])
            print(f"{self.name}: ModelScope lists no checksum of {len(unverified)} files: {examples}", flush=True)
        files = [file for file in snapshot.files if file.path in selected and not _is_complete(file, folder)]
        files.sort(key=lambda file: file.revision)
        check_no_links((folder / file.path).parent for file in files)
        with self._translate_errors(), translate_disk_errors(self.cache):
            for revision, group in groupby(files, key=lambda file: file.revision):
                entries = [{"Path": file.path, "Size": file.size, "Sha256": file.sha256} for file in group]
                self._connect().download_repo(
                    self.name, self.kind, revision=revision, local_dir=folder, file_list=entries
                )
        return folder

    def _list_files(self, revision: str) -> Snapshot:
        api = self._connect()
        with self._translate_errors():
            try:
                entries = api.legacy.list_repo_files(self.name, self.kind, revision)
            except (NotExistError, InvalidParameter) as error:
                api.legacy.get_repo_info(self.name, self.kind)  # raises an error if the repository does not exist
                raise MissingRevision(first_line(error)) from error
        try:
            snapshot = _parse_list(entries, revision)
        except (AttributeError, TypeError, ValueError) as error:
            raise HubUnavailable(f'ModelScope returned an invalid list of files of "{self.name}": {error}') from error
        if not snapshot.files:  # the client also returns an empty list if the response is an error with status 200
            raise HubUnavailable(f'ModelScope returned no files of "{self.name}"')
        return snapshot

    def _connect(self) -> HubApi:
        """Return a client with endpoint and token of the environment, whose file locks all jobs of the claim share."""
        return HubApi(HubConfig(cache_dir=self.cache))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except _NOT_READABLE as error:
            raise MissingRepository(first_line(error)) from error
        except FileDownloadError as error:
            if fault := next(filter(is_storage_fault, error.failed_files.values()), None):
                raise StorageFault(first_line(fault)) from error
            failures = [f"{path}: {first_line(failure)}" for path, failure in sorted(error.failed_files.items())]
            raise HubUnavailable(
                f'"{self.name}" could not be downloaded from ModelScope: {"; ".join(failures[:3])}'
            ) from error
        except (HubError, RequestException, OSError) as error:
            raise HubUnavailable(f'"{self.name}" could not be read from ModelScope: {first_line(error)}') from error

    def _get_list_file(self, revision: str) -> Path:
        key = f"{self.kind} {self.name} {revision}"
        return self.cache / f"files-{sha256(key.encode()).hexdigest()[:16]}.json"


def _read_list(file: Path) -> Snapshot | None:
    """Return the list in a file, or None if it is missing, damaged, or contains a path outside of the repository."""
    try:
        snapshot = _SNAPSHOT.validate_json(read_regular_file(file))
    except (OSError, ValueError):
        return None
    is_inside = re.fullmatch(COMMIT_PATTERN, snapshot.commit) and all(_is_inside(each.path) for each in snapshot.files)
    return snapshot if is_inside else None


def _parse_list(entries: Sequence[Mapping[str, Any]], revision: str) -> Snapshot:
    """Return the files in the response of ModelScope, without those whose path is outside the repository."""
    blobs = [entry for entry in entries if entry.get("Type") != "tree" and _is_inside(str(entry.get("Path", "..")))]
    files = [
        RemoteFile(
            str(entry["Path"]),
            None if entry.get("Size") is None else int(entry["Size"]),
            str(entry.get("Sha256") or ""),
            str(entry.get("Revision") or revision),
        )
        for entry in blobs
    ]
    files.sort(key=lambda file: file.path)
    newest = str(max(blobs, key=_get_time, default={}).get("Revision"))
    commits = (name for name in (revision, newest) if re.fullmatch(COMMIT_PATTERN, name))
    return Snapshot(next(commits, _compute_hash(files)[:40]), tuple(files))


def _compute_hash(files: Iterable[RemoteFile]) -> str:
    content = "\n".join(f"{file.path} {file.size} {file.sha256} {file.revision}" for file in files)
    return sha256(content.encode()).hexdigest()


def _get_time(entry: Mapping[str, Any]) -> int:
    """Return the time of the commit that changed a file last, 0 if it is unknown."""
    text = str(entry.get("CommittedDate"))
    return int(text) if text.isdecimal() else 0


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not os.path.isabs(path)


def _is_complete(file: RemoteFile, folder: Path) -> bool:
    """Return whether the file was downloaded; the client renames a file only after it has checked its content."""
    path = folder / file.path
    return path.is_file() and file.size in (None, path.stat().st_size)
