"""Checkpoints: published whole, listed newest first, never resumed from when a file is missing or short."""

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune_trainer.atomic_files import remove, write_json
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.errors import CheckpointCorrupt, DiskFull

_MANIFEST = "manifest.json"
_PREFIX = "step-"


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, and why newer ones were passed over."""

    path: Path | None
    passed_over: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return step_of(self.path) if self.path else 0


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one job."""

    output: Output
    keep: int

    def save(self, step: int, world_size: int, write: Callable[[Path], None], *, spared: int | None = None) -> str:
        """`write` fills a folder; it is published with a manifest, and then the oldest are pruned. Gives its name.

        That of the step `spared` stays, however old it is.
        """
        folder = self._folder(step)

        def write_all(staged: Path) -> None:
            write(staged)
            _write_manifest(staged, {"step": step, "worldSize": world_size, **self._identity(), "time": time.time()})

        self.publish(folder, write_all, spared=spared)
        _prune(list(self._newest_first())[self.keep :], spared)
        return folder.name

    def publish(self, folder: Path, write: Callable[[Path], None], *, spared: int | None = None) -> None:
        """As the output does; into a full volume once more, after the checkpoints that can be spared. Raises DiskFull.

        `write` may be called twice. What stays is the newest whole checkpoint, and that of the step `spared`.
        """
        try:
            self.output.publish(folder, write)
        except DiskFull as error:
            found = list(self._newest_first())
            whole = next((number for number, each in enumerate(found) if self._problem(each) is None), len(found))
            removed = _prune(found[whole + 1 :], spared)
            if not removed:
                raise
            print(f"{error}; {', '.join(removed)} made room, {folder.name} is written again", flush=True)
            self.output.publish(folder, write)

    def newest(self) -> Found:
        """The newest whole checkpoint of this job. Raises CheckpointCorrupt if there are some and none is whole."""
        return self._first_whole(self._newest_first())

    def first_whole(self, steps: Iterable[int]) -> Found:
        """Of the checkpoints of these steps. Raises CheckpointCorrupt if none is."""
        return self._first_whole(self._folder(step) for step in steps)

    def _first_whole(self, folders: Iterable[Path]) -> Found:
        passed_over: list[str] = []
        for folder in folders:
            problem = self._problem(folder)
            if problem is None:
                return Found(folder, tuple(passed_over))
            passed_over.append(f"{folder.name}: {problem}")
        if passed_over:
            raise CheckpointCorrupt(
                f"no checkpoint in {self.output.checkpoints} is whole ({'; '.join(passed_over)}); restore one, or"
                " delete them to start from the beginning"
            )
        return Found(None)

    def _folder(self, step: int) -> Path:
        return self.output.checkpoints / f"{_PREFIX}{step:08d}"

    def _identity(self) -> dict[str, object]:
        identity = self.output.identity
        return {"uid": identity.uid, "fingerprint": identity.fingerprint, "attempt": identity.attempt}

    def _newest_first(self) -> Iterator[Path]:
        yield from sorted(self.output.checkpoints.glob(f"{_PREFIX}*"), reverse=True)

    def _problem(self, folder: Path) -> str | None:
        """Why it cannot be resumed from, or None."""
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            files = dict(manifest["files"])
            owner = manifest["uid"], manifest["fingerprint"]
        except FileNotFoundError:
            return f"{_MANIFEST} is missing"
        except (ValueError, KeyError, TypeError):
            return f"{_MANIFEST} is damaged"
        if owner != (self.output.identity.uid, self.output.identity.fingerprint):
            return "it belongs to another job"
        for name, size in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
        return None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _prune(checkpoints: Iterable[Path], spared: int | None) -> tuple[str, ...]:
    """Gives the names of those that went. The manifest goes first: half a checkpoint must not pass for a whole one."""
    old = [checkpoint for checkpoint in checkpoints if step_of(checkpoint) != spared]
    for checkpoint in old:
        (checkpoint / _MANIFEST).unlink(missing_ok=True)
        remove(checkpoint)
    return tuple(checkpoint.name for checkpoint in old)


def _write_manifest(folder: Path, described: dict[str, object]) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / _MANIFEST, {**described, "files": files})


def random_state() -> dict[str, Any]:
    """Of every generator that training draws from, in types that torch.load reads without running code."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def random_state_file(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:05d}.pt"
