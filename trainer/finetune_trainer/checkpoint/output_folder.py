"""Manages the ownership of output folders, atomic publishing and the success marker."""

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from finetune_supervisor.contract import parse_json
from finetune_supervisor.failures.full_volumes import is_volume_full
from finetune_supervisor.success_marker import get_success_marker_path, is_result_published
from finetune_trainer.atomic_files import fsync_folder, fsync_tree, remove_path, translate_disk_errors, write_json
from finetune_trainer.checkpoint.manifest import (
    COMPUTED_ENTRIES,
    MANIFEST,
    Manifest,
    UnusableCheckpoint,
    list_checkpoints,
    read_manifest,
)
from finetune_trainer.checkpoint.row_identity import RowIdentity, check_trained_rows
from finetune_trainer.checksums import seal
from finetune_trainer.errors import OutputError, StorageFault
from finetune_trainer.foreign_files import read_regular_file

_REPLACED_OUTPUT = "replaced-output-"  # name prefix of folders with the output of other jobs
_ADVICE = (
    "choose another output.subPath, which changes nothing here; or set output.overwrite, which moves them to"
    f" {_REPLACED_OUTPUT}1 in this folder until this job has a checkpoint or needs the space"
)
_SHARED_STORAGE_TIMEOUT_SECONDS = 30.0  # network file systems may delay new files on other nodes


@dataclass(frozen=True)
class Identity:
    """Identity of a job, its running attempt and its training settings; written to job.json."""

    uid: str
    namespace: str
    name: str
    attempt: int
    fingerprint: str  # hash of model, dataset, method and training settings

    def has_same_settings(self, fingerprint: object) -> bool:
        """Return whether a stored fingerprint is that of this job's settings.

        A fingerprint of another version of the algorithm cannot be compared and counts as the same: the API server
        rejects changes of these settings, so only local mode could have changed them.
        """
        version, _, _ = self.fingerprint.rpartition(":")
        stored_version = fingerprint.rpartition(":")[0] if isinstance(fingerprint, str) else version
        return fingerprint == self.fingerprint or stored_version != version


@dataclass(frozen=True)
class OutputFolder:
    """Output folder of one job. Only the holder, which job.json identifies, may publish to the folder."""

    root: Path
    identity: Identity

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints and staged files."""
        return self.root / "checkpoints"

    @property
    def result(self) -> Path:
        """Folder of the published result."""
        return self.root / "result"

    @property
    def logs(self) -> Path:
        """Folder of logs and metrics."""
        return self.root / "logs"

    @property
    def job_file(self) -> Path:
        """Path of job.json, which identifies the holder."""
        return self.root / "job.json"

    @property
    def success_file(self) -> Path:
        """Path of the success marker."""
        return get_success_marker_path(self.root)

    @property
    def staging_prefix(self) -> str:
        """Name prefix of staged files, which a newer attempt deletes when it claims the folder."""
        return f".tmp-attempt-{self.identity.attempt}-"

    def is_finished(self) -> bool:
        """Return whether this job has published its result."""
        return is_result_published(self.root, uid=self.identity.uid)

    def check_owner(self, *, overwrite: bool) -> None:
        """Raise OutputError if another job, a newer attempt or another configuration owns the folder.

        Called on every rank before the model is loaded. Writes nothing.
        """
        holder = self._read_holder()
        attempt = holder.get("attempt") if holder and self._is_own(holder) else None
        if isinstance(attempt, int) and attempt > self.identity.attempt:
            raise OutputError(f"{self.root} is superseded by attempt {attempt}; this is {self.identity.attempt}")
        if not overwrite and (foreign_output := self._find_foreign_output(holder)):
            raise OutputError(f"{self.root} holds {foreign_output}; {_ADVICE}")

    def _find_foreign_output(self, holder: Mapping[str, object] | None) -> str | None:
        """Return what the folder contains that this job may not continue, or None."""
        if holder is None:
            # a save that loses its claim leaves staged files, with a leading dot, below the mount point
            found = {path.name for folder in (self.checkpoints, self.result) for path in folder.glob("[!.]*")}
            return "the output of an unknown owner" if found - COMPUTED_ENTRIES else None
        if self._is_own(holder):
            same = self.identity.has_same_settings(holder.get("fingerprint"))
            return None if same else "checkpoints of this job with another model, dataset, method or training setting"
        owner, name = _describe_owner(holder), (self.identity.namespace, self.identity.name)
        if (holder.get("namespace"), holder.get("name")) != name:
            return f"the output of {owner}"
        # Names are unique in a cluster: a job of the same name was deleted, and its pods are gone (decisions/205).
        if self.result.exists():
            return f"the result of {owner}, which was deleted"
        same = not list_checkpoints(self.checkpoints) or holder.get("fingerprint") == self.identity.fingerprint
        return None if same else f"checkpoints of {owner}, which was deleted and had other settings"

    def read_trained_rows(self, *, overwrite: bool) -> RowIdentity | None:
        """Return the row identity of the newest checkpoint that `claim` leaves to this job; None without one.

        It is empty if a release without row identities wrote the checkpoint.
        """
        job = (self.identity.namespace, self.identity.name)
        for _, manifest in _read_manifests(self.checkpoints):
            owner = manifest.content
            is_predecessor = not overwrite and (owner.get("namespace"), owner.get("name")) == job
            if (is_predecessor or self._is_own(owner)) and self.identity.has_same_settings(owner.get("fingerprint")):
                return dict(owner.get("rows", {}))
        return None

    def claim(self, *, overwrite: bool, rows: Mapping[str, str] = {}) -> str:
        """Make this attempt the holder and return a token for check_shared_storage. Called on rank 0 only.

        Checkpoints of a deleted job with the same name, settings and rows become those of this job (decisions/546).
        Checkpoints and result of other jobs are moved aside until `remove_replaced_output` deletes them.
        rows: identity of the rows of this attempt; empty if unknown.
        Raises: OutputError if the folder may not be claimed or written, or if its checkpoints have other rows.
        """
        self.check_owner(overwrite=overwrite)
        if (trained_rows := self.read_trained_rows(overwrite=overwrite)) is not None:
            check_trained_rows(self.root, trained_rows, rows)
        with translate_disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._restore_replaced_folders()
            holder = self._read_holder()
            token = secrets.token_hex(8)
            if holder is None or not self.has_same_configuration(holder):
                if overwrite or holder is None or not list_checkpoints(self.checkpoints):
                    self._move_output_aside()
                else:
                    self._adopt_checkpoints(holder)
            if is_volume_full(self.root):
                self.remove_replaced_output()
            write_json(self.job_file, {**asdict(self.identity), "token": token})
            self.checkpoints.mkdir(exist_ok=True)
            # Remove staged files after the claim, because older attempts can no longer publish them.
            self._remove_staged_files()
        return token

    def check_shared_storage(self, token: str) -> None:
        """Wait until this node can read the token of rank 0. Raises: OutputError if the storage is not shared."""
        deadline = time.monotonic() + _SHARED_STORAGE_TIMEOUT_SECONDS
        while (holder := _read_json_object(self.job_file)) is None or holder.get("token") != token:
            if time.monotonic() > deadline:
                raise OutputError(
                    f"{self.root} on this node is not the folder that rank 0 writes; all nodes need the same storage,"
                    " so spec.output needs a ReadWriteMany claim"
                )
            time.sleep(0.2)

    def check_holder(self) -> None:
        """Raise OutputError if another attempt or job has claimed the folder, and StorageFault if job.json is gone."""
        holder = _read_json_object(self.job_file)
        if holder is None:
            raise StorageFault(f"{self.root} lost job.json: it is no longer mounted, or its files were deleted")
        if not self._is_own(holder):
            raise OutputError(f"{self.root} was taken over by {_describe_owner(holder)}; nothing more is written there")
        if isinstance(attempt := holder.get("attempt"), int) and attempt > self.identity.attempt:
            raise OutputError(f"{self.root}: superseded by attempt {attempt}; nothing more is written")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Check the holder before the `with` block writes to the folder, and again if the block raises an error.

        The error may be a consequence: a newer attempt deletes staged files, and a lost claim leaves its mount point.
        Raises: OutputError; StorageFault; DiskFull if the volume is full.
        """
        with translate_disk_errors(self.root):
            self.check_holder()
            try:
                yield
            except Exception:
                self.check_holder()
                raise

    def publish(self, folder: Path, write_files: Callable[[Path], None]) -> None:
        """Write and flush a staged folder, and rename it to `folder` if this attempt is still the holder.

        write_files: function that fills the empty staged folder.
        Raises: OutputError, or DiskFull if the volume is full.
        """
        staged = self.get_staged_folder(folder)
        with self.writing():
            remove_path(staged)
            staged.mkdir(parents=True)
            write_files(staged)
            self.publish_staged(folder)

    def get_staged_folder(self, folder: Path) -> Path:
        """Return the folder in which the files of `folder` are written before it is published."""
        return self.checkpoints / f"{self.staging_prefix}{folder.name}"

    def publish_staged(self, folder: Path) -> None:
        """Flush a staged folder, and rename it to `folder` if this attempt is the holder. Call it within `writing`."""
        staged = self.get_staged_folder(folder)
        fsync_tree(staged)
        replaced = staged.with_name(f"{self.staging_prefix}replaced-{folder.name}")
        self.check_holder()
        if folder.exists():
            folder.rename(replaced)
        staged.rename(folder)
        fsync_folder(folder.parent)  # before anything that it replaces is deleted
        remove_path(replaced)

    def mark_success(self) -> None:
        """Write the success marker, which marks the published result as complete."""
        marker = {"uid": self.identity.uid, "fingerprint": self.identity.fingerprint, "attempt": self.identity.attempt}
        with self.writing():
            write_json(self.success_file, marker, staging_file=self.checkpoints / f"{self.staging_prefix}SUCCESS")

    def remove_replaced_output(self) -> tuple[str, ...]:
        """Delete the output of other jobs that `claim` moved aside, and return the names of its folders."""
        folders = [path for path in self.root.glob(f"{_REPLACED_OUTPUT}*") if path.name.rpartition("-")[2].isdigit()]
        for folder in folders:
            remove_path(folder)
        return tuple(folder.name for folder in folders)

    def has_same_configuration(self, holder: Mapping[str, object]) -> bool:
        """Return whether a folder or a checkpoint belongs to this job with these settings."""
        return self._is_own(holder) and self.identity.has_same_settings(holder.get("fingerprint"))

    def _read_holder(self) -> Mapping[str, object] | None:
        """Return job.json or, if it is lost, the owner of a checkpoint: this job, if any checkpoint is its own."""
        if (holder := _read_json_object(self.job_file)) is not None:
            return holder
        owners = [manifest.content for _, manifest in _read_manifests(self.checkpoints)]
        return next(iter([owner for owner in owners if self._is_own(owner)] or owners), None)

    def _is_own(self, holder: Mapping[str, object]) -> bool:
        return holder.get("uid") == self.identity.uid

    def _adopt_checkpoints(self, holder: Mapping[str, object]) -> None:
        """Make the checkpoints of a deleted job those of this job."""
        owner = f"{_describe_owner(holder)}, which was deleted"
        for folder, manifest in _read_manifests(self.checkpoints):
            if manifest.content.get("uid") == holder.get("uid"):
                content = {**manifest.content, **asdict(self.identity)}
                write_json(folder / MANIFEST, seal(content) if manifest.has_checksums else content)
        print(f"{self.root}: continues the training of {owner}", flush=True)

    def _move_output_aside(self) -> None:
        """Move checkpoints and result of another job or configuration to a new folder; own checkpoints stay."""
        manifests = _read_manifests(self.checkpoints)
        own = [folder for folder, manifest in manifests if self.has_same_configuration(manifest.content)]
        entries = [path for path in (*self.checkpoints.glob("*"), *self.root.glob(self.result.name)) if path not in own]
        if not entries:
            return
        folders = (self.root / f"{_REPLACED_OUTPUT}{number}" for number in count(1))
        aside = next(folder for folder in folders if not folder.exists())
        (aside / self.checkpoints.name).mkdir(parents=True)
        for entry in (*entries, *self.root.glob(self.job_file.name)):
            entry.rename(aside / entry.relative_to(self.root))
        print(f"{self.root}: the replaced output is in {aside.name} until this job has a checkpoint", flush=True)

    def _restore_replaced_folders(self) -> None:
        """Restore folders that an attempt moved aside to replace them, if it ended before it could do so."""
        for entry in self.checkpoints.glob(".tmp-attempt-*-replaced-*"):
            name = entry.name.partition("-replaced-")[2]
            folder = (self.root if name == self.result.name else self.checkpoints) / name
            if not folder.exists():
                entry.rename(folder)

    def _remove_staged_files(self) -> None:
        """Delete unpublished files of older attempts."""
        for entry in self.checkpoints.glob(".tmp-*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)  # errors are expected if an older attempt still adds files
            else:
                entry.unlink(missing_ok=True)


def _read_json_object(path: Path) -> dict[str, object] | None:
    """Return the JSON object in a file, or None if the file is missing or damaged."""
    try:
        value = parse_json(read_regular_file(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _read_manifests(checkpoints: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the checkpoints with a readable manifest, newest first."""
    for folder in list_checkpoints(checkpoints):
        with suppress(UnusableCheckpoint):
            yield folder, read_manifest(folder)


def _describe_owner(holder: Mapping[str, object]) -> str:
    name = f"job {holder['namespace']}/{holder.get('name')}" if "namespace" in holder else "a job"
    return f"{name} (uid {holder.get('uid')})"
