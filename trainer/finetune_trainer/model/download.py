"""Downloads the files of a Hub model before all ranks read them from the cache (decisions/523)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.atomic_files import translate_disk_errors
from finetune_trainer.distributed.rank_context import RankContext
from finetune_trainer.model.load import is_path, load_or_raise
from finetune_trainer.once_per_job import DownloadSettings, check_hub_cache, fetch_once_per_job

# Files that transformers reads. Other weights, such as consolidated.safetensors, would double the download.
_DESCRIPTION_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_FILES = (*_DESCRIPTION_FILES, "model*.safetensors")
_PICKLED_WEIGHTS = ("pytorch_model*.bin",)  # only read if a model has no safetensors


def choose_model_downloads(source: ModelSource, context: RankContext, downloads: DownloadSettings) -> DownloadSettings:
    """Return the settings for one download per attempt, or one per node if the nodes do not share the Hub cache.

    An attempt checks the cache again, because its files may have been deleted. The wait for the writer is unlimited: it
    ends with the writer, whose failure ends all ranks, and the supervisor limits the phase.
    """
    is_shared = source.hub == "modelscope" or Path(constants.HF_HUB_CACHE).is_relative_to(context.cache)
    return replace(
        downloads,
        folder=downloads.folder if is_shared else context.run.path,
        job_uid=f"{downloads.job_uid} {context.attempt}",
        is_writer=downloads.is_writer if is_shared else context.ranks.local_rank == 0,
        timeout_seconds=math.inf,
    )


def download_model(source: ModelSource, downloads: DownloadSettings) -> ModelSource:
    """Download the missing files of the model to the Hub cache, or wait until the writer has done it.

    Return the source to load: the folder of a model on ModelScope, otherwise the given source. If the Hugging Face Hub
    cannot be reached, nothing is downloaded, and the loaders of the files use the cache or raise an error.
    Does nothing for a path. Raises: ModelNotFound, ModelError, HubUnavailable or DiskFull.
    """
    if is_path(source.name):
        return source
    folder = fetch_once_per_job(
        downloads,
        f"files of {source.name} {source.revision}",
        lambda _: _download(source, downloads),
        goal=f'model "{source.name}" was not downloaded from the Hub',
    )
    return source.model_copy(update={"name": folder, "revision": None}) if folder else source


def download_description(source: ModelSource, folder: Path) -> ModelSource:
    """Download a model on ModelScope without its weights, and return the source to read; others are unchanged.

    Raises: ModelNotFound or HubUnavailable.
    """
    if source.hub != "modelscope" or is_path(source.name):
        return source
    from finetune_trainer.model.modelscope_model import download_files

    def select(paths: Sequence[str]) -> list[str]:
        return _filter(paths, _DESCRIPTION_FILES)

    return source.model_copy(update={"name": str(download_files(source, folder, select)), "revision": None})


def select_model_files(paths: Sequence[str]) -> list[str]:
    """Return the files that transformers reads."""
    has_safetensors = any(path.endswith(".safetensors") for path in paths)
    return _filter(paths, _FILES if has_safetensors else (*_FILES, *_PICKLED_WEIGHTS))


def _filter(paths: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [path for path in paths if any(fnmatch(path, pattern) for pattern in patterns)]


def _download(source: ModelSource, downloads: DownloadSettings) -> str | None:
    """Download the files, and return the folder of a model on ModelScope."""
    if source.hub == "modelscope":
        from finetune_trainer.model.modelscope_model import download_files  # importing its client takes 0.2 s

        return str(download_files(source, downloads.modelscope_cache, select_model_files))
    load_or_raise(source, lambda: _download_from_hugging_face(source))
    return None


def _download_from_hugging_face(source: ModelSource) -> None:
    check_hub_cache(source.name)
    with translate_disk_errors(Path(constants.HF_HUB_CACHE)):  # report a full disk as DiskFull, not as a Hub failure
        try:
            folder = Path(snapshot_download(source.name, revision=source.revision, allow_patterns=list(_FILES)))
            if not any(folder.glob("*.safetensors")):
                snapshot_download(source.name, revision=source.revision, allow_patterns=list(_PICKLED_WEIGHTS))
        except LocalEntryNotFoundError:
            return
