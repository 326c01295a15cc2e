"""Finds and downloads models on ModelScope, and names the fields of the spec in the errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import ModelNotFound
from finetune_trainer.modelscope_files import MissingRepository, MissingRevision, ModelScopeRepository


def resolve_commit(source: ModelSource, cache: Path) -> str:
    """Return the commit of the model's revision. Raises: ModelNotFound, HubUnavailable, DiskFull or OutputError."""
    with _name_fields(source):
        return ModelScopeRepository("model", source.name, cache).find_snapshot(source.revision).commit


def download_files(source: ModelSource, cache: Path, select_files: Callable[[Sequence[str]], Sequence[str]]) -> Path:
    """Download the missing ones of the selected files and return their folder.

    Raises: ModelNotFound, HubUnavailable, DiskFull or OutputError.
    """
    with _name_fields(source):
        repository = ModelScopeRepository("model", source.name, cache)
        snapshot = repository.find_snapshot(source.revision)
        paths = [file.path for file in snapshot.files]
        if "config.json" not in paths:
            raise ModelNotFound(
                f'spec.model.name: "{source.name}" on ModelScope has no config.json; choose a repository with a model'
                " that transformers loads"
            )
        return repository.download(snapshot, select_files(paths))


@contextmanager
def _name_fields(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except MissingRevision as error:
        raise ModelNotFound(
            f'spec.model.revision: "{source.revision or "master"}" is no branch, tag or commit of model "{source.name}"'
            " on ModelScope; correct it"
        ) from error
    except MissingRepository as error:
        raise ModelNotFound(
            f'spec.model.name: "{source.name}" is neither a path nor a model on ModelScope that this job may read'
            f" ({error}); correct the name, or set MODELSCOPE_API_TOKEN from a Secret in spec.env if it is private"
        ) from error
