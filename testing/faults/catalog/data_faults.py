"""Data faults, which damage the checkpoints or dataset files of a fine-tuning job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.faults.catalog.fault import InjectedFault, build_trainer_fields
from testing.faults.catalog.rank_faults import kill_rank
from testing.faults.job_under_test import JobUnderTest, RawBody


@contextmanager
def truncate_newest_checkpoint(job: JobUnderTest) -> Iterator[None]:
    with kill_rank(job):  # kill a rank first, so that no newer checkpoint is written
        truncate_largest_file(list_complete_checkpoints(job)[-1])
        yield


@contextmanager
def truncate_all_checkpoints(job: JobUnderTest) -> Iterator[None]:
    with kill_rank(job):
        for checkpoint in list_complete_checkpoints(job):
            truncate_largest_file(checkpoint)
        yield


def list_complete_checkpoints(job: JobUnderTest) -> list[Path]:
    """Return the folders of the complete checkpoints, oldest first.

    Raises: TimeoutError if there is none.
    """
    paths = sorted(path.parent for path in (job.output / "checkpoints").glob("step-*/manifest.json"))
    if not paths:
        raise TimeoutError(f"{job.name}: no checkpoint to truncate")
    return paths


def truncate_largest_file(checkpoint: Path) -> None:
    """Truncate the largest file of the checkpoint to half its size."""
    largest_file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest_file, largest_file.stat().st_size // 2)


@contextmanager
def remove_dataset(job: JobUnderTest) -> Iterator[None]:
    with kill_rank(job):
        get_dataset_path(job).unlink()
        yield


def get_dataset_path(job: JobUnderTest) -> Path:
    return job.installation.get_claim_folder("datasets") / f"{job.name}.jsonl"


def copy_dataset(job: JobUnderTest) -> RawBody:
    shutil.copy(job.installation.get_claim_folder("datasets") / "train.jsonl", get_dataset_path(job))
    return build_trainer_fields(dataset={"train": [{"name": f"/data/{get_dataset_path(job).name}"}], "maxLength": 128})


DATA_FAULTS = {
    "checkpoint-truncated": InjectedFault(
        truncate_newest_checkpoint, lambda _: build_trainer_fields(), injection_step=45, is_isolated=True
    ),
    "checkpoints-truncated": InjectedFault(
        truncate_all_checkpoints, lambda _: build_trainer_fields(), injection_step=25, is_isolated=True
    ),
    "dataset-vanished": InjectedFault(remove_dataset, copy_dataset, injection_step=25, is_isolated=True),
}
