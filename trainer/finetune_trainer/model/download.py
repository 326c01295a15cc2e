"""Downloads the files of a Hub model before all ranks read them from the cache (decisions/523)."""

import math
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.atomic_files import translate_disk_errors
from finetune_trainer.distributed.rank_context import RankContext
from finetune_trainer.model.load import is_path, load_or_raise
from finetune_trainer.once_per_job import DownloadSettings, fetch_once_per_job

# Files that transformers reads. Other weights, such as consolidated.safetensors, would double the download.
_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "model*.safetensors")
_PICKLED_WEIGHTS = ("pytorch_model*.bin",)  # only read if a model has no safetensors


def choose_model_downloads(context: RankContext, downloads: DownloadSettings) -> DownloadSettings:
    """Return the settings for one download per attempt, or one per node if the nodes do not share the Hub cache.

    An attempt checks the cache again, because its files may have been deleted. The wait for the writer is unlimited: it
    ends with the writer, whose failure ends all ranks, and the supervisor limits the phase.
    """
    is_shared = Path(constants.HF_HUB_CACHE).is_relative_to(context.cache)
    return replace(
        downloads,
        folder=downloads.folder if is_shared else context.run.path,
        job_uid=f"{downloads.job_uid} {context.attempt}",
        is_writer=downloads.is_writer if is_shared else context.ranks.local_rank == 0,
        timeout_seconds=math.inf,
    )


def download_model(source: ModelSource, downloads: DownloadSettings) -> None:
    """Download the missing files of the model to the Hub cache, or wait until the writer has done it.

    If the Hub cannot be reached, nothing is downloaded, and the loaders of the files use the cache or raise an error.
    Does nothing for a path. Raises: ModelNotFound, ModelError, HubUnavailable or DiskFull.
    """
    if is_path(source.name):
        return
    fetch_once_per_job(
        downloads,
        f"files of {source.name} {source.revision}",
        lambda: load_or_raise(source, lambda: _download(source)),
        goal=f'model "{source.name}" was not downloaded from the Hub',
    )


def _download(source: ModelSource) -> None:
    with translate_disk_errors(Path(constants.HF_HUB_CACHE)):  # report a full disk as DiskFull, not as a Hub failure
        try:
            folder = Path(snapshot_download(source.name, revision=source.revision, allow_patterns=list(_FILES)))
            if not any(folder.glob("*.safetensors")):
                snapshot_download(source.name, revision=source.revision, allow_patterns=list(_PICKLED_WEIGHTS))
        except LocalEntryNotFoundError:
            return
