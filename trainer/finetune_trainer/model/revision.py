"""Resolves the revision of a Hub model to a commit, once per job (decisions/517)."""

from pathlib import Path

from huggingface_hub import hf_hub_download

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.atomic_files import translate_disk_errors
from finetune_trainer.model.load import is_path, load_or_raise
from finetune_trainer.once_per_job import DownloadSettings, check_hub_cache, fetch_once_per_job


def pin_revision(source: ModelSource, downloads: DownloadSettings) -> ModelSource:
    """Return the source with its revision replaced by the commit that the first attempt of the job resolved.

    A path is returned unchanged. Raises: ModelNotFound, ModelError or HubUnavailable.
    """
    if is_path(source.name):
        return source
    commit = fetch_once_per_job(
        downloads,
        f"spec.model {source.name} {source.revision}",
        lambda _: _resolve(source, downloads),
        goal=f'spec.model.revision: rank 0 did not resolve the commit of model "{source.name}" on the Hub',
    )
    return source.model_copy(update={"revision": commit})


def _resolve(source: ModelSource, downloads: DownloadSettings) -> str:
    if source.hub == "modelscope":
        from finetune_trainer.model.modelscope_model import resolve_commit  # importing its client takes 0.2 s

        return resolve_commit(source, downloads.modelscope_cache)
    return load_or_raise(source, lambda: _resolve_commit(source, downloads))


def _resolve_commit(source: ModelSource, downloads: DownloadSettings) -> str:
    """Return the commit on the Hub or, if the Hub cannot be reached, the commit of the revision in the local cache.

    Downloading a file also stores the commit of the branch or tag in the cache, for jobs that cannot reach the Hub.
    """
    check_hub_cache(source.name)
    with translate_disk_errors(downloads.folder):  # report a full disk as DiskFull, not as a Hub failure
        config = hf_hub_download(source.name, "config.json", revision=source.revision)
    return Path(config).parent.name  # the cache stores files under snapshots/COMMIT
