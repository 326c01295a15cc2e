"""The files of a source: one, those of a folder, or those of a dataset on the Hub."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.atomic_files import explained, write_json
from finetune_trainer.data_sources.readers import READERS
from finetune_trainer.errors import DatasetError, HubUnavailable, first_line

TRAIN, EVAL = "spec.dataset.train", "spec.dataset.eval"

_HUB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*/[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_USUAL = {TRAIN: ("train",), EVAL: ("validation", "test")}  # splits of a Hub dataset, the first that there is
_ALSO = {"train": ("training",), "validation": ("valid", "val", "dev"), "test": ("testing", "eval", "evaluation")}


@dataclass(frozen=True)
class Downloads:
    """On storage that all ranks share. One of them `writes`; what it got once stays the same for the whole `job`."""

    folder: Path
    job: str
    writes: bool
    alive: Callable[[], None]
    patience: float  # seconds that the others wait


def find_files(source: DatasetSource, downloads: Downloads, *, field: str) -> tuple[Path, ...]:
    """In order of their names. Raises DatasetError, naming `field`, or HubUnavailable."""
    path = Path(source.path)
    if path.is_file() and path.suffix in READERS:
        return (path,)
    if path.is_dir():
        inside = sorted(each.relative_to(path) for each in path.rglob("*") if each.is_file())
        return tuple(path / name for name in choose(inside, source, field=field))
    if path.exists():
        raise DatasetError(f'{field}: "{source.path}" is no {", ".join(READERS)} file and no folder with such files')
    if not _HUB_ID.fullmatch(source.path):
        raise DatasetError(
            f'{field}: "{source.path}" does not exist; mount the volume that holds it (spec.volumes) or correct the'
            " path"
        )
    return _from_hub(source, downloads, field=field)


def choose(
    names: Sequence[PurePath], source: DatasetSource, *, field: str, usual: Sequence[str] = ()
) -> list[PurePath]:
    """Those that hold rows, of the subset and split that are asked for, or of the first `usual` split there is."""
    found = [name for name in names if name.suffix in READERS]
    if source.subset:
        found = [name for name in found if source.subset in name.parts[:-1]]
    if source.split:
        found = _of_split(found, source.split)
    else:
        found = next((some for split in usual if (some := _of_split(found, split))), found)
    if not found:
        asked = "".join(f" of {what} {word}" for what in ("subset", "split") if (word := getattr(source, what)))
        there = ", ".join(map(str, names[:10])) or "nothing"
        raise DatasetError(f'{field}: "{source.path}" holds no {", ".join(READERS)} file{asked}; it holds {there}')
    return found


def _of_split(names: Sequence[PurePath], split: str) -> list[PurePath]:
    """Those whose path says the split, as a word of its own."""
    words = "|".join(map(re.escape, (split, *_ALSO.get(split, ()))))
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")
    return [name for name in names if pattern.search(name.as_posix())]


def _from_hub(source: DatasetSource, downloads: Downloads, *, field: str) -> tuple[Path, ...]:
    name = sha256(f"{downloads.job} {field} {source.model_dump_json()}".encode()).hexdigest()[:16]
    listed = downloads.folder / f"{name}.json"
    if downloads.writes and not listed.exists():
        write_json(listed, [str(file) for file in _download(source, downloads, field=field)])
    deadline = time.monotonic() + downloads.patience
    while not listed.exists():
        if time.monotonic() > deadline:
            raise HubUnavailable(
                f'{field}: rank 0 did not download "{source.path}" to {downloads.folder} within {downloads.patience:g}'
                " seconds; raise spec.training.ddpTimeout if it needs longer"
            )
        time.sleep(0.1)
    return tuple(map(Path, json.loads(listed.read_text(encoding="utf-8"))))


def _download(source: DatasetSource, downloads: Downloads, *, field: str) -> tuple[Path, ...]:
    downloads.alive()
    try:
        there = HfApi().dataset_info(source.path, revision=source.revision)
        names = sorted(PurePosixPath(each.rfilename) for each in there.siblings or ())
        chosen = choose(names, source, field=field, usual=_USUAL[field.partition("[")[0]])
        folder = downloads.folder / f"{source.path.replace('/', '--')}@{there.sha}"
        with explained(downloads.folder):  # a full disk is not the Hub's fault
            snapshot_download(
                source.path,
                repo_type="dataset",
                revision=there.sha,
                local_dir=folder,
                allow_patterns=[str(name) for name in chosen],
            )
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise DatasetError(
            f'{field}: "{source.path}" is no path here and no dataset on the Hub that this job may read'
            f" ({first_line(error)}); correct the name, mount the volume that holds it (spec.volumes), or give"
            " HF_TOKEN from a Secret in spec.env"
        ) from error
    except OSError as error:
        raise HubUnavailable(f'the Hub could not give dataset "{source.path}": {first_line(error)}') from error
    return tuple(folder / name for name in chosen)
