"""Writes, validates and prunes checkpoints. Training never resumes from an incomplete checkpoint."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.atomic_files import remove_path, write_json
from finetune_trainer.checkpoint.output_folder import CHECKPOINT_PREFIX, OutputFolder
from finetune_trainer.errors import CheckpointCorrupt, DiskFull

_MANIFEST = "manifest.json"


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

    def save(
        self, step: int, world_size: int, write_files: Callable[[Path], None], *, retained_step: int | None = None
    ) -> str:
        """Publish a checkpoint with a manifest, prune old checkpoints and return the name of the checkpoint.

        write_files: function that fills an empty folder; it may be called twice.
        retained_step: step whose checkpoint is never pruned, such as the step of the best evaluation.
        Raises: DiskFull or OutputError.
        """
        folder = self._get_folder(step)

        def write_with_manifest(staged_folder: Path) -> None:
            write_files(staged_folder)
            metadata = {"step": step, "worldSize": world_size, **self._build_owner_metadata(), "time": time.time()}
            _write_manifest(staged_folder, metadata)

        self.publish(folder, write_with_manifest, retained_step=retained_step)
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
            existing = list(self._list_newest_first())
            complete = (index for index, path in enumerate(existing) if self._find_defect(path) is None)
            removed = _prune(existing[next(complete, len(existing)) + 1 :], retained_step)
            if not removed:
                raise
            print(f"{error}; deleted {', '.join(removed)}, writing {folder.name} again", flush=True)
            self.output.publish(folder, write_files)

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
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
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


def _write_manifest(folder: Path, metadata: dict[str, object]) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / _MANIFEST, {**metadata, "files": files})
