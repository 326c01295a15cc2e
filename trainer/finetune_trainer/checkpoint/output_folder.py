"""Manages the ownership of output folders, atomic publishing and the success marker."""

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from finetune_supervisor.contract import parse_json
from finetune_supervisor.success_marker import get_success_marker_path, is_result_published
from finetune_trainer.atomic_files import fsync_tree, remove_path, translate_disk_errors, write_json
from finetune_trainer.errors import OutputError, StorageFault

CHECKPOINT_PREFIX = "step-"  # name prefix of published checkpoints, such as step-00000100
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
        holder = _read_json_object(self.job_file)
        if holder is not None and holder.get("uid") == self.identity.uid:
            attempt = holder.get("attempt")
            if isinstance(attempt, int) and attempt > self.identity.attempt:
                raise OutputError(f"{self.root} is superseded by attempt {attempt}; this is {self.identity.attempt}")
            if self.identity.has_same_settings(holder.get("fingerprint")) or overwrite:
                return
            raise OutputError(
                f"{self.root} holds checkpoints of this job with another model, dataset, method or training setting;"
                " give the changed job another output.subPath, or set output.overwrite to start over"
            )
        # A save that loses its claim leaves staged files below the mount point.
        occupied = any(folder.is_dir() and any(folder.glob("[!.]*")) for folder in (self.checkpoints, self.result))
        if (occupied or holder is not None) and not (overwrite or self._is_owned_by_job_without_output(holder)):
            raise OutputError(
                f"{self.root} holds the output of {_describe_owner(holder)}; choose another output.subPath,"
                " or set output.overwrite to replace it"
            )

    def claim(self, *, overwrite: bool) -> str:
        """Make this attempt the holder and return a token for check_shared_storage. Called on rank 0 only.

        Deletes the checkpoints and the result of another job or configuration.
        Raises: OutputError if the folder may not be claimed or written.
        """
        self.check_owner(overwrite=overwrite)
        with translate_disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            holder = _read_json_object(self.job_file)
            token = secrets.token_hex(8)
            if holder is None or not self._has_same_configuration(holder):
                remove_path(self.checkpoints)
                remove_path(self.result)
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
        if holder.get("uid") != self.identity.uid:
            raise OutputError(f"{self.root} was taken over by {_describe_owner(holder)}; nothing more is written there")
        if holder.get("attempt") != self.identity.attempt:
            raise OutputError(f"{self.root}: superseded by attempt {holder.get('attempt')}; nothing more is written")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Check the holder before the `with` block writes to the folder, and again if the block raises an error.

        The error may be a consequence: a newer attempt deletes staged files, and a lost claim leaves its mount point.
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
        """Flush a staged folder, and rename it to `folder` if this attempt is still the holder.

        Raises: OutputError, or DiskFull if the volume is full.
        """
        staged = self.get_staged_folder(folder)
        with self.writing():
            fsync_tree(staged)
            replaced = staged.with_name(f"{self.staging_prefix}replaced-{folder.name}")
            self.check_holder()
            if folder.exists():
                folder.rename(replaced)
            staged.rename(folder)
            remove_path(replaced)

    def mark_success(self) -> None:
        """Write the success marker, which marks the published result as complete."""
        marker = {"uid": self.identity.uid, "fingerprint": self.identity.fingerprint, "attempt": self.identity.attempt}
        with self.writing():
            write_json(self.success_file, marker, staging_file=self.checkpoints / f"{self.staging_prefix}SUCCESS")

    def _is_owned_by_job_without_output(self, holder: dict[str, object] | None) -> bool:
        """Return whether a deleted job of the same name owns the folder and has published no checkpoint or result."""
        if holder is None or (holder.get("namespace"), holder.get("name")) != (
            self.identity.namespace,
            self.identity.name,
        ):
            return False
        return not self.result.exists() and not any(self.checkpoints.glob(f"{CHECKPOINT_PREFIX}*"))

    def _has_same_configuration(self, holder: dict[str, object]) -> bool:
        return holder.get("uid") == self.identity.uid and self.identity.has_same_settings(holder.get("fingerprint"))

    def _remove_staged_files(self) -> None:
        """Delete unpublished files of older attempts."""
        for entry in self.checkpoints.glob(".tmp-*"):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)  # errors are expected if an older attempt still adds files
            else:
                entry.unlink(missing_ok=True)


def _read_json_object(path: Path) -> dict[str, object] | None:
    """Return the JSON object in a file, or None if the file is missing or damaged."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _describe_owner(holder: dict[str, object] | None) -> str:
    if holder is None:
        return "an unknown owner"
    return f"job {holder.get('namespace')}/{holder.get('name')} (uid {holder.get('uid')})"
