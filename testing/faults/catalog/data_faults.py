"""What becomes of the files that the operator's own trainer goes on from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.faults.catalog.fault import Fault, trainer
from testing.faults.catalog.rank_faults import kill_rank
from testing.faults.job_under_test import Raw, Scene


@contextmanager
def cut_the_newest_checkpoint(scene: Scene) -> Iterator[None]:
    with kill_rank(scene):  # first, because then none is newer
        cut_in_half(checkpoints(scene)[-1])
        yield


@contextmanager
def cut_all_checkpoints(scene: Scene) -> Iterator[None]:
    with kill_rank(scene):
        for checkpoint in checkpoints(scene):
            cut_in_half(checkpoint)
        yield


def checkpoints(scene: Scene) -> list[Path]:
    """Those that are whole, oldest first."""
    found = sorted(path.parent for path in (scene.output / "checkpoints").glob("step-*/manifest.json"))
    if not found:
        raise TimeoutError(f"{scene.job}: no checkpoint to be cut")
    return found


def cut_in_half(checkpoint: Path) -> None:
    """Its largest file."""
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


@contextmanager
def remove_rows(scene: Scene) -> Iterator[None]:
    with kill_rank(scene):
        own_rows(scene).unlink()
        yield


def own_rows(scene: Scene) -> Path:
    return scene.stack.folder("datasets") / f"{scene.job}.jsonl"


def with_rows_of_its_own(scene: Scene) -> Raw:
    shutil.copy(scene.stack.folder("datasets") / "train.jsonl", own_rows(scene))
    return trainer(dataset={"train": [{"name": f"/data/{own_rows(scene).name}"}], "maxLength": 128})


DATA_FAULTS = {
    "checkpoint-truncated": Fault(lambda _: trainer(), cut_the_newest_checkpoint, at_step=45, spares_others=True),
    "checkpoints-truncated": Fault(lambda _: trainer(), cut_all_checkpoints, at_step=25, spares_others=True),
    "dataset-vanished": Fault(with_rows_of_its_own, remove_rows, at_step=25, spares_others=True),
}
