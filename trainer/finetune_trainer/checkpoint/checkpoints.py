"""Writes, verifies and prunes checkpoints. Training resumes only from intact checkpoints (decisions/545)."""

import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from finetune_trainer.atomic_files import fsync_files, remove_path, translate_disk_errors, write_json
from finetune_trainer.checkpoint.manifest import (
    CHECKPOINT_PREFIX,
    COMPUTED_ENTRIES,
    MANIFEST,
    Manifest,
    UnusableCheckpoint,
    list_checkpoints,
    parse_checkpoint_step,
    read_manifest,
)
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.checkpoint.row_identity import RowIdentity
from finetune_trainer.checksums import FileRecord, find_damage, record_file, seal
from finetune_trainer.distributed.collectives import NO_TIMEOUT, all_gather_objects, run_on_rank_zero
from finetune_trainer.errors import CheckpointCorrupt, DiskFull

WriteFiles = Callable[[Path], list[Path]]  # writes files to a folder and returns their paths; may be called twice
Records = dict[str, FileRecord]  # by path relative to the checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint to resume from, and the reasons why other checkpoints were skipped."""

    path: Path | None  # None if training starts from the beginning
    skipped: tuple[str, ...] = ()  # one message per skipped checkpoint
    is_verified: bool = True  # False: a release without checksums wrote the checkpoint

    @property
    def step(self) -> int:
        """Number of optimizer steps that the checkpoint contains, or 0 without a checkpoint."""
        return parse_checkpoint_step(self.path) if self.path else 0


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one job, of which the newest `keep_last` intact ones are kept."""

    output: OutputFolder
    keep_last: int
    send_heartbeat: Callable[[], None] = lambda: None  # called while files are verified
    damaged: dict[Path, str] = field(default_factory=dict)  # checkpoints whose content is damaged, and how
    rows: RowIdentity = field(default_factory=dict)  # of this attempt; every checkpoint contains it

    def stage(self, step: int, write_files: WriteFiles) -> Records:
        """Write, checksum and flush the files of this rank; all ranks may do so at the same time.

        Raises: DiskFull, OutputError or StorageFault.
        """
        staged = self.output.get_staged_folder(self._get_folder(step))
        with self.output.writing():
            staged.mkdir(parents=True, exist_ok=True)
            paths = write_files(staged)
            records = {str(path.relative_to(staged)): record_file(path) for path in paths}  # still in the page cache
            fsync_files(paths)
        return records

    def publish_staged(self, step: int, files_by_rank: Sequence[Records], *, retained_step: int | None = None) -> str:
        """Publish the files that all ranks have staged, prune old checkpoints and return the checkpoint's name.

        Called on rank 0 only. files_by_rank: the return values of `stage`.
        retained_step: step whose checkpoint is never pruned, such as the step of the best evaluation.
        Raises: DiskFull or OutputError.
        """
        folder = self._get_folder(step)
        files = dict(ChainMap(*files_by_rank))
        manifest = {
            "step": step,
            "worldSize": len(files_by_rank),
            **asdict(self.output.identity),
            "rows": dict(self.rows),
            "time": time.time(),
            "files": {name: record.size_bytes for name, record in files.items()},
            "crc32": {name: record.crc32 for name, record in files.items()},
        }
        with self.output.writing():
            write_json(self.output.get_staged_folder(folder) / MANIFEST, seal(manifest))
            self.output.publish_staged(folder)
            self.damaged.pop(folder, None)
            self._prune(folder, retained_step)
            self.output.remove_replaced_output()
        return folder.name

    def publish(self, folder: Path, write_files: Callable[[Path], None], *, retained_step: int | None = None) -> None:
        """Publish a folder; if the volume is full, free space and retry (decisions/212).

        Never deletes the newest intact checkpoint or the checkpoint of `retained_step`.
        write_files: function that fills an empty folder; it may be called several times.
        Raises: DiskFull or OutputError.
        """
        try:
            self.output.publish(folder, write_files)
        except DiskFull as error:
            if not self.free_space(error, retained_step=retained_step):
                raise
            self.publish(folder, write_files, retained_step=retained_step)

    def free_space(self, error: DiskFull, *, retained_step: int | None) -> bool:
        """Delete the replaced output of another job, else damaged checkpoints, else older intact ones.

        Return False if nothing was deleted. Without an intact checkpoint, no checkpoint is deleted.
        """
        with self.output.writing():
            intact, damaged = self._divide()
            removed = self.output.remove_replaced_output()
            if not removed and intact:
                removed = _delete(damaged, retained_step) or _delete(intact[1:], retained_step)
        if removed:
            print(f"{error}; deleted {', '.join(removed)}, trying again", flush=True)
        return bool(removed)

    def find_intact(self, steps: Iterable[int] | None = None) -> ResumePoint:
        """Return the first intact one of `steps`, or the newest (collective). Raises: CheckpointCorrupt if none is."""
        folders = run_on_rank_zero(self._list_candidates) if steps is None else list(map(self._get_folder, steps))
        skipped: list[str] = []
        for folder in folders:
            try:
                manifest = run_on_rank_zero(partial(self.inspect, folder))
                if manifest.has_checksums:
                    self._verify_files(folder, manifest)
                return ResumePoint(folder, tuple(skipped), is_verified=manifest.has_checksums)
            except UnusableCheckpoint as error:
                skipped.append(f"{folder.name}: {error}")
                if not error.is_foreign:
                    self.damaged[folder] = str(error)
        if skipped:
            raise CheckpointCorrupt(
                f"no checkpoint in {self.output.checkpoints} is intact ({'; '.join(skipped)}); nothing was deleted:"
                " restore one, or move them to another folder to start from the beginning"
            )
        return ResumePoint(None)

    def _verify_files(self, folder: Path, manifest: Manifest) -> None:
        """Read each file on one rank (collective). Raises: UnusableCheckpoint, on every rank, if one is damaged."""
        started_at = time.monotonic()
        files = sorted(manifest.files.items(), key=lambda item: (item[1].size_bytes, item[0]))
        with translate_disk_errors(folder):
            problems = [
                f"{name} {damage}"
                for name, record in files[dist.get_rank() :: dist.get_world_size()]  # about equally many bytes for each
                if (damage := find_damage(folder / name, record, report_progress=self.send_heartbeat))
            ]
        group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)  # another rank may read for longer than ddpTimeout
        problems = list(chain(*all_gather_objects(problems, group)))
        dist.destroy_process_group(group)
        if dist.get_rank() == 0:
            size = sum(record.size_bytes for record in manifest.files.values()) / 1e9
            seconds = max(time.monotonic() - started_at, 1e-3)
            print(f"{folder.name}: read {size:.2f} GB in {seconds:.1f} s ({size / seconds:.2f} GB/s)", flush=True)
        if problems:
            raise UnusableCheckpoint(problems[0])

    def _list_candidates(self) -> list[Path]:
        """Return the folders of checkpoints, newest first, and name the folders beside them that are ignored."""
        candidates = list_checkpoints(self.output.checkpoints)
        for path in sorted(self.output.checkpoints.glob("[!.]*")):
            if path.is_dir() and path not in candidates and path.name not in COMPUTED_ENTRIES:
                print(f"checkpoints: {path} is ignored, because it is not a checkpoint of this job", flush=True)
        return candidates

    def inspect(self, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint without reading its files. Raises: UnusableCheckpoint with the reason."""
        if folder in self.damaged:
            raise UnusableCheckpoint(self.damaged[folder])
        manifest = read_manifest(folder)
        if not self.output.has_same_configuration(manifest.content):
            raise UnusableCheckpoint("it belongs to another job", is_foreign=True)
        if manifest.step != parse_checkpoint_step(folder):
            raise UnusableCheckpoint(f"it is a copy of the checkpoint of step {manifest.step}", is_foreign=True)
        for name, record in manifest.files.items():
            if damage := find_damage(folder / name, record):
                raise UnusableCheckpoint(f"{name} {damage}")
        return manifest

    def _get_folder(self, step: int) -> Path:
        return self.output.checkpoints / f"{CHECKPOINT_PREFIX}{step:08d}"

    def _divide(self) -> tuple[list[Path], list[Path]]:
        """Return the intact and the damaged checkpoints of this job, newest first."""
        intact, damaged = [], []
        for folder in list_checkpoints(self.output.checkpoints):
            try:
                self.inspect(folder)
                intact.append(folder)
            except UnusableCheckpoint as error:
                damaged += [] if error.is_foreign else [folder]
        return intact, damaged

    def _prune(self, newest: Path, retained_step: int | None) -> None:
        """Delete intact checkpoints beyond the limit, and damaged ones that are older than the newest one."""
        intact, damaged = self._divide()
        older = [folder for folder in intact if folder != newest]
        step = parse_checkpoint_step(newest)
        outdated = [folder for folder in damaged if parse_checkpoint_step(folder) < step]
        _delete(older[self.keep_last - 1 :] + outdated, retained_step)


def _delete(checkpoints: Iterable[Path], retained_step: int | None) -> tuple[str, ...]:
    """Delete all checkpoints except the one of `retained_step`, and return the names of the deleted ones."""
    old = [checkpoint for checkpoint in checkpoints if parse_checkpoint_step(checkpoint) != retained_step]
    for checkpoint in old:
        # Delete the manifest first, so that a partly deleted checkpoint is incomplete.
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        remove_path(checkpoint)
    return tuple(checkpoint.name for checkpoint in old)
