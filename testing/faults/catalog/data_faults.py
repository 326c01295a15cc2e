"""Faults of the data that the operator's own trainer resumes from: checkpoints and dataset files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.faults.catalog.fault import InjectedFault, trainer_fields
from testing.faults.catalog.rank_faults import kill_rank
from testing.faults.job_under_test import JobUnderTest, RawBody


@contextmanager
def truncate_newest_checkpoint(job: JobUnderTest) -> Iterator[None]:
    with kill_rank(job):  # first, so that no newer checkpoint is written
        truncate_largest_file(complete_checkpoints(job)[-1])
        yield


@contextmanager
def truncate_all_checkpoints(job: JobUnderTest) -> Iterator[None]:
    with kill_rank(job):
        for checkpoint in complete_checkpoints(job):
            truncate_largest_file(checkpoint)
        yield


def complete_checkpoints(job: JobUnderTest) -> list[Path]:
    """Return the folders of the complete checkpoints, oldest first.

    Raises: TimeoutError if there is none.
    """
    paths = sorted(path.parent for path in (job.output / "checkpoints").glob("step-*/manifest.json"))
    if not paths:
        raise TimeoutError(f"{job.name}: no checkpoint to truncate")
    return paths


def truncate_largest_file(checkpoint: Path) -> None:
    """Truncate the largest file of the checkpoint to half its size."""
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


@contextmanager
def remove_dataset(job: JobUnderTest) -> Iterator[None]:
    with kill_rank(job):
        own_dataset(job).unlink()
        yield


def own_dataset(job: JobUnderTest) -> Path:
    return job.stack.folder("datasets") / f"{job.name}.jsonl"


def with_own_dataset(job: JobUnderTest) -> RawBody:
    shutil.copy(job.stack.folder("datasets") / "train.jsonl", own_dataset(job))
    return trainer_fields(dataset={"train": [{"name": f"/data/{own_dataset(job).name}"}], "maxLength": 128})


DATA_FAULTS = {
    "checkpoint-truncated": InjectedFault(
        lambda _: trainer_fields(), truncate_newest_checkpoint, at_step=45, is_isolated=True
    ),
    "checkpoints-truncated": InjectedFault(
        lambda _: trainer_fields(), truncate_all_checkpoints, at_step=25, is_isolated=True
    ),
    "dataset-vanished": InjectedFault(with_own_dataset, remove_dataset, at_step=25, is_isolated=True),
}
