"""Fetches values from the Hub once per job, on storage that all ranks and attempts of the job share (decisions/508)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from finetune_supervisor.contract import parse_json
from finetune_trainer.atomic_files import check_no_links, translate_disk_errors, write_json
from finetune_trainer.errors import HubUnavailable
from finetune_trainer.foreign_files import read_regular_file


@dataclass(frozen=True)
class DownloadSettings:
    """Settings for downloading to storage that all ranks and attempts of a job share."""

    folder: Path
    job_uid: str
    is_writer: bool  # whether this process downloads
    send_heartbeat: Callable[[], None]
    timeout_seconds: float  # time limit of the other processes for the download

    @property
    def modelscope_cache(self) -> Path:
        """Folder for files of ModelScope, which all jobs on this storage share."""
        return self.folder / "modelscope"


def fetch_once_per_job(downloads: DownloadSettings, key: str, fetch: Callable[[Any], object], *, goal: str) -> Any:
    """Return the JSON value of `fetch`, which the writer calls once per job and key while the other processes wait.

    A JSON file stores the value for the other processes and for later attempts. If it is damaged, or names a path that
    is missing or outside of the folder, the writer fetches again. fetch: called with this old value, or None.
    goal: what the writer does, for the error message of a timeout. Raises: HubUnavailable on a timeout; DiskFull or
    OutputError if the file cannot be written; errors of `fetch`.
    """
    name = sha256(f"{downloads.job_uid} {key}".encode()).hexdigest()[:16]
    file = downloads.folder / f"{name}.json"
    value, is_usable = _read_value(file, downloads.folder)
    if downloads.is_writer and not is_usable:
        downloads.send_heartbeat()
        value, is_usable = fetch(value), True
        with translate_disk_errors(downloads.folder):
            write_json(file, value)
    deadline = time.monotonic() + downloads.timeout_seconds
    while not is_usable:
        if time.monotonic() > deadline:
            raise HubUnavailable(
                f"{goal} within {downloads.timeout_seconds:g} seconds; raise spec.training.ddpTimeout if it needs"
                " longer"
            )
        downloads.send_heartbeat()
        time.sleep(0.1)
        value, is_usable = _read_value(file, downloads.folder)
    return value


def check_hub_cache(name: str) -> None:
    """Check that no folder for downloads of a model or adapter of the Hub is a link. Raises: OutputError."""
    repository = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    folders = (repository / folder for folder in ("blobs", "refs", "snapshots"))
    check_no_links((*folders, *repository.glob("snapshots/*/")))


def _read_value(file: Path, folder: Path) -> tuple[Any, bool]:
    """Return the JSON value, and whether all paths in it are those of existing files in the folder."""
    try:
        value = parse_json(read_regular_file(file))
    except (FileNotFoundError, ValueError):
        return None, False
    paths = [Path(text) for text in map(str, value if isinstance(value, list) else [value]) if "/" in text]
    return value, all(path.exists() and path.is_relative_to(folder) and ".." not in path.parts for path in paths)
