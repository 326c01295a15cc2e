"""Writes, validates and prunes checkpoints. Training never resumes from an incomplete checkpoint."""

import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor.contract import parse_json
from finetune_trainer.atomic_files import fsync_files, remove_path, write_json
from finetune_trainer.checkpoint.output_folder import CHECKPOINT_PREFIX, OutputFolder
from finetune_trainer.errors import CheckpointCorrupt, DiskFull

_MANIFEST = "manifest.json"

WriteFiles = Callable[[Path], list[Path]]  # writes files to a folder and returns their paths; may be called twice
FileSizes = dict[str, int]  # sizes in bytes, by path relative to the checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint to resume from, and the reasons why other checkpoints were skipped."""

    path: Path | None  # None if training starts from the beginning
    skipped: tuple[str, ...] = ()  # one message per skipped checkpoint

    @property
    def step(self) -> int:
        """Number of optimizer steps that the checkpoint contains, or 0 without a checkpoint."""
        return parse_checkpoint_step(self.path) if self.path else 0


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one job, of which the newest `keep_last` are kept."""

    output: OutputFolder
    keep_last: int

    def stage(self, step: int, write_files: WriteFiles) -> FileSizes:
        """Write and flush the files of this rank for a checkpoint; all ranks may do so at the same time.

        Raises: DiskFull, OutputError or StorageFault.
        """
        staged = self.output.get_staged_folder(self._get_folder(step))
        with self.output.writing():
            staged.mkdir(parents=True, exist_ok=True)
            paths = write_files(staged)
            fsync_files(paths)
        return {str(path.relative_to(staged)): path.stat().st_size for path in paths}

    def publish_staged(self, step: int, files_by_rank: Sequence[FileSizes], *, retained_step: int | None = None) -> str:
        """Publish the files that all ranks have staged, prune old checkpoints and return the checkpoint's name.

        Called on rank 0 only. files_by_rank: the return values of `stage`.
        retained_step: step whose checkpoint is never pruned, such as the step of the best evaluation.
        Raises: DiskFull or OutputError.
        """
        folder = self._get_folder(step)
        manifest = {
            "step": step,
            "worldSize": len(files_by_rank),
            **self._build_owner_metadata(),
            "time": time.time(),
            "files": dict(ChainMap(*files_by_rank)),
        }
        with self.output.writing():
            write_json(self.output.get_staged_folder(folder) / _MANIFEST, manifest)
            self.output.publish_staged(folder)
            _prune(list(self._list_newest_first())[self.keep_last :], retained_step)
        return folder.name

    def publish(self, folder: Path, write_files: Callable[[Path], None], *, retained_step: int | None = None) -> None:
        """Publish a folder; if the volume is full, delete old checkpoints and retry once (decisions/212).

        Never deletes the newest complete checkpoint or the checkpoint of `retained_step`.
        write_files: function that fills an empty folder; it may be called twice.
        Raises: DiskFull or OutputError.
        """
        try:
            self.output.publish(folder, write_files)
        except DiskFull as error:
            if not self.free_space(error, retained_step=retained_step):
                raise
            self.output.publish(folder, write_files)

    def free_space(self, error: DiskFull, *, retained_step: int | None) -> bool:
        """Delete old checkpoints of a full volume, except the newest complete one and that of `retained_step`.

        Return False if there are none.
        """
        existing = list(self._list_newest_first())
        complete = (index for index, path in enumerate(existing) if self._find_defect(path) is None)
        removed = _prune(existing[next(complete, len(existing)) + 1 :], retained_step)
        if removed:
            print(f"{error}; deleted {', '.join(removed)}, trying again", flush=True)
        return bool(removed)

    def find_newest_complete(self) -> ResumePoint:
        """Return the newest complete checkpoint, if any. Raises: CheckpointCorrupt if no checkpoint is complete."""
        return self._find_first_complete(self._list_newest_first())

    def find_first_complete(self, steps: Iterable[int]) -> ResumePoint:
        """Return the first complete checkpoint of these steps. Raises: CheckpointCorrupt if none is complete."""
        return self._find_first_complete(self._get_folder(step) for step in steps)

    def _find_first_complete(self, folders: Iterable[Path]) -> ResumePoint:
        skipped: list[str] = []
        for folder in folders:
            defect = self._find_defect(folder)
            if defect is None:
                return ResumePoint(folder, tuple(skipped))
            skipped.append(f"{folder.name}: {defect}")
        if skipped:
            raise CheckpointCorrupt(
                f"no checkpoint in {self.output.checkpoints} is complete ({'; '.join(skipped)}); restore one, or"
                " delete them to start from the beginning"
            )
        return ResumePoint(None)

    def _get_folder(self, step: int) -> Path:
        return self.output.checkpoints / f"{CHECKPOINT_PREFIX}{step:08d}"

    def _build_owner_metadata(self) -> dict[str, object]:
        identity = self.output.identity
        return {"uid": identity.uid, "fingerprint": identity.fingerprint, "attempt": identity.attempt}

    def _list_newest_first(self) -> Iterator[Path]:
        yield from sorted(self.output.checkpoints.glob(f"{CHECKPOINT_PREFIX}*"), reverse=True)

    def _find_defect(self, folder: Path) -> str | None:
        """Return the reason why training cannot resume from the checkpoint, or None if it is complete."""
        try:
            manifest = parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))
            files = dict(manifest["files"])
            uid, fingerprint = manifest["uid"], manifest["fingerprint"]
        except FileNotFoundError:
            return f"{_MANIFEST} is missing"
        except (ValueError, KeyError, TypeError):
            return f"{_MANIFEST} is damaged"
        if uid != self.output.identity.uid or not self.output.identity.has_same_settings(fingerprint):
            return "it belongs to another job"
        for name, size in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
        return None


def parse_checkpoint_step(checkpoint: Path) -> int:
    """Parse the number of completed optimizer steps from the name of a checkpoint folder."""
    return int(checkpoint.name.removeprefix(CHECKPOINT_PREFIX))


def _prune(checkpoints: Iterable[Path], retained_step: int | None) -> tuple[str, ...]:
    """Delete all checkpoints except the one of `retained_step`, and return the names of the deleted ones."""
    old = [checkpoint for checkpoint in checkpoints if parse_checkpoint_step(checkpoint) != retained_step]
    for checkpoint in old:
        # Delete the manifest first, so that a partly deleted checkpoint is incomplete.
        (checkpoint / _MANIFEST).unlink(missing_ok=True)
        remove_path(checkpoint)
    return tuple(checkpoint.name for checkpoint in old)
