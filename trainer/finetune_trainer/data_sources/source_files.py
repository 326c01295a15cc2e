"""Finds the files of a source, which is a file, a folder or a dataset on the Hub."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath, PurePosixPath

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_api.v1alpha1.name_types import COMMIT_PATTERN, HUB_ID_PATTERN
from finetune_trainer.atomic_files import check_no_links, translate_disk_errors
from finetune_trainer.data_sources.readers import READERS
from finetune_trainer.errors import DatasetError, HubUnavailable, first_line
from finetune_trainer.once_per_job import DownloadSettings, fetch_once_per_job

TRAIN_FIELD, EVAL_FIELD = "spec.dataset.train", "spec.dataset.eval"

# default splits of Hub datasets, in order of preference
_DEFAULT_SPLITS = {TRAIN_FIELD: ("train",), EVAL_FIELD: ("validation", "test")}
_SPLIT_ALIASES = {
    "train": ("training",),
    "validation": ("valid", "val", "dev"),
    "test": ("testing", "eval", "evaluation"),
}


def find_files(source: DatasetSource, downloads: DownloadSettings, *, spec_field: str) -> tuple[Path, ...]:
    """Return the files of the source, sorted by name.

    spec_field: path of the source in the spec, for error messages. Raises: DatasetError or HubUnavailable.
    """
    path = Path(source.path)
    if path.is_file() and path.suffix in READERS:
        return (path,)
    if path.is_dir():
        names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        return tuple(path / name for name in select_files(names, source, spec_field=spec_field))
    if path.exists():
        raise DatasetError(
            f'{spec_field}: "{source.path}" is neither a {", ".join(READERS)} file nor a folder with such files'
        )
    if not re.fullmatch(HUB_ID_PATTERN, source.path):
        raise DatasetError(
            f'{spec_field}: "{source.path}" does not exist; mount the volume that holds it (spec.volumes) or correct'
            " the path"
        )
    return _find_hub_files(source, downloads, spec_field=spec_field)


def is_hub_dataset(source: DatasetSource) -> bool:
    """Return whether the source is a dataset on the Hub; an existing path has precedence over a Hub id."""
    return not Path(source.path).exists() and re.fullmatch(HUB_ID_PATTERN, source.path) is not None


def select_files(
    paths: Sequence[PurePath], source: DatasetSource, *, spec_field: str, default_splits: Sequence[str] = ()
) -> list[PurePath]:
    """Return the data files of the source's subset and split.

    If the source specifies no split, return the files of the first default split that has files, or all files.
    Raises: DatasetError if no file matches.
    """
    matches = [path for path in paths if path.suffix in READERS]
    if source.subset:
        matches = [path for path in matches if source.subset in path.parts[:-1]]
    if source.split:
        matches = _filter_by_split(matches, source.split)
    else:
        files_by_split = (_filter_by_split(matches, split) for split in default_splits)
        matches = next((files for files in files_by_split if files), matches)
    if not matches:
        restriction = "".join(f" of {key} {value}" for key in ("subset", "split") if (value := getattr(source, key)))
        existing = ", ".join(map(str, paths[:10])) or "nothing"
        raise DatasetError(
            f'{spec_field}: "{source.path}" contains no {", ".join(READERS)} file{restriction}; it contains {existing}'
        )
    return matches


def _filter_by_split(paths: Sequence[PurePath], split: str) -> list[PurePath]:
    """Return the files whose path contains the split or one of its aliases as a whole word."""
    words = "|".join(map(re.escape, (split, *_SPLIT_ALIASES.get(split, ()))))
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")
    return [path for path in paths if pattern.search(path.as_posix())]


def _find_hub_files(source: DatasetSource, downloads: DownloadSettings, *, spec_field: str) -> tuple[Path, ...]:
    """Return the files of a Hub dataset, which the writer downloads once per job while the other processes wait.

    Files that were deleted since are downloaded again, at the same commit.
    """
    files = fetch_once_per_job(
        downloads,
        f"{spec_field} {source.model_dump_json()}",
        lambda stored: list(map(str, _download(source, downloads, str(stored), spec_field=spec_field))),
        goal=f'{spec_field}: rank 0 did not download "{source.path}" to {downloads.folder}',
    )
    return tuple(map(Path, files))


def _download(
    source: DatasetSource, downloads: DownloadSettings, stored_paths: str, *, spec_field: str
) -> tuple[Path, ...]:
    """Download the files. stored_paths: the paths of an earlier download of the job, which contain the commit."""
    if source.hub == "modelscope":
        return _download_from_modelscope(source, downloads, stored_paths, spec_field=spec_field)
    stored_commit = re.search(r"@([0-9a-f]{40})/", stored_paths)
    try:
        repository = HfApi().dataset_info(source.path, revision=stored_commit[1] if stored_commit else source.revision)
        names = (file.rfilename for file in repository.siblings or ())
        selected = _select_hub_files(names, source, spec_field=spec_field)
        # a server that the job chooses must not choose the folder
        if not re.fullmatch(COMMIT_PATTERN, str(repository.sha)):
            raise HubUnavailable(f'the Hub returned the commit {str(repository.sha)[:50]!r} of "{source.path}"')
        folder = downloads.folder / f"{source.path.replace('/', '--')}@{repository.sha}"
        check_no_links((folder / name).parent for name in selected)
        with translate_disk_errors(downloads.folder):  # report a full disk as DiskFull, not as a Hub failure
            snapshot_download(
                source.path,
                repo_type="dataset",
                revision=repository.sha,
                local_dir=folder,
                allow_patterns=[str(name) for name in selected],
            )
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise DatasetError(
            f'{spec_field}: "{source.path}" is neither an existing path nor a dataset on the Hub that this job may read'
            f" ({first_line(error)}); correct the name, mount the volume that holds it (spec.volumes), or provide"
            " HF_TOKEN from a Secret in spec.env"
        ) from error
    except (httpx2.HTTPError, OSError) as error:
        raise HubUnavailable(
            f'dataset "{source.path}" could not be downloaded from the Hub: {first_line(error)}'
        ) from error
    return tuple(folder / name for name in selected)


def _download_from_modelscope(
    source: DatasetSource, downloads: DownloadSettings, stored_paths: str, *, spec_field: str
) -> tuple[Path, ...]:
    from finetune_trainer.modelscope_files import MissingRepository, MissingRevision, ModelScopeRepository

    repository = ModelScopeRepository("dataset", source.path, downloads.modelscope_cache)
    try:
        snapshot = repository.find_snapshot_in(stored_paths) or repository.find_snapshot(source.revision)
        selected = _select_hub_files((file.path for file in snapshot.files), source, spec_field=spec_field)
        folder = repository.download(snapshot, map(str, selected))
    except (MissingRepository, MissingRevision) as error:
        revision = f" of revision {source.revision}" if isinstance(error, MissingRevision) else ""
        raise DatasetError(
            f'{spec_field}: "{source.path}" is neither an existing path nor a dataset{revision} on ModelScope that this'
            f" job may read ({error}); correct name or revision, mount the volume that holds it (spec.volumes), or"
            " provide MODELSCOPE_API_TOKEN from a Secret in spec.env"
        ) from error
    return tuple(folder / name for name in selected)


def _select_hub_files(names: Iterable[str], source: DatasetSource, *, spec_field: str) -> list[PurePath]:
    paths = sorted(map(PurePosixPath, names))
    default_splits = _DEFAULT_SPLITS[spec_field.partition("[")[0]]
    return select_files(paths, source, spec_field=spec_field, default_splits=default_splits)
