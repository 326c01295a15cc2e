"""Opens files that others may have written or replaced by links, and copies those of a model to this pod."""

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import constants

from finetune_supervisor import contract
from finetune_supervisor.failures.redact import list_mounts
from finetune_trainer.errors import ModelError, first_line

_SYSTEM_FOLDERS = tuple(map(Path, ("/proc", "/sys", "/dev", "/run/secrets", "/var/run/secrets")))
_COPIED = frozenset((".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".vocab"))
_WEIGHTS = frozenset((".safetensors", ".bin"))


class ForbiddenFile(OSError):
    """The path leads to a file that is not regular, or outside of the folders from which files may be read."""


def open_foreign(path: Path, folders: Sequence[Path] | None = None) -> BinaryIO:
    """Open a file for reading that is regular and, after its links are resolved, in one of the folders.

    folders: None for any but those of the system and of Secrets. The file that is open is checked, so that nobody can
    replace it meanwhile. Raises: ForbiddenFile, or another OSError.
    """
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
    descriptor = Path(f"/proc/self/fd/{file.fileno()}")
    target = (descriptor if descriptor.exists() else path).resolve()
    is_inside = folders is None or any(target.is_relative_to(folder) for folder in folders)
    secrets = _list_mounts(os.environ.get(contract.CONFIG, ""), of_secrets=True)
    is_secret = any(target.is_relative_to(folder) for folder in (*_SYSTEM_FOLDERS, *secrets))
    is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    if is_regular and is_inside and not is_secret:
        return file
    with file:
        if is_regular:
            file.read(1)  # an I/O error is a fault of the storage, wherever the link leads
    raise ForbiddenFile(f"{path} leads to {target}, from which the trainer reads nothing; replace it by a file")


def read_regular_file(path: Path) -> bytes:
    """Return the content of a file that the trainer wrote. Raises: ValueError if it is of another kind, or OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb", opener=_open_without_waiting) as file:
        return file.read()


def _open_without_waiting(name: str, flags: int) -> int:
    """Open a file; do not wait for a writer if it is a pipe."""
    return os.open(name, flags | os.O_NONBLOCK)


def open_data_file(path: str | Path) -> BinaryIO:
    """Open a file of a dataset; a link may lead to its folder and to any volume with data. Raises: OSError."""
    if contract.STATUS_HOST in os.environ or contract.CONFIG not in os.environ:  # local mode, or no job
        return open_foreign(Path(path))
    output = Path(os.environ[contract.CACHE_DIR]).parent
    folders = (Path(path).parent, output, *_list_mounts(os.environ[contract.CONFIG], of_secrets=False))
    return open_foreign(Path(path), [folder.resolve() for folder in folders])


def copy_model_files(folder: Path, subject: str) -> str:
    """Copy the texts of a model or adapter, and link its weights, to a folder that exists until this process ends.

    Other files are left out. subject: field and value of the spec, for error messages. Raises: ModelError.
    """
    root, copy = folder.resolve(), tempfile.mkdtemp(prefix="model-")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    folders = (root, *_list_blob_folders(root))
    for path in sorted((*folder.iterdir(), *folder.glob("additional_chat_templates/*"))):
        if path.suffix not in _COPIED | _WEIGHTS or path.is_dir():
            continue
        target = Path(copy, path.relative_to(folder))
        target.parent.mkdir(exist_ok=True)
        try:
            with open_foreign(path, folders) as file:
                if path.suffix in _WEIGHTS:
                    target.symlink_to(path.resolve())
                else:
                    with target.open("wb") as copied:
                        shutil.copyfileobj(file, copied)
        except ForbiddenFile as error:
            raise ModelError(f"{subject}: {first_line(error)}") from error
        except (PermissionError, FileNotFoundError):
            continue  # the loader reports it if it needs the file
    return copy


def _list_blob_folders(folder: Path) -> tuple[Path, ...]:
    """Return the folders to which huggingface_hub links the files of a snapshot in its cache."""
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return ()
    shared_stores = (repository.parent, Path(constants.HF_HUB_CACHE).resolve())
    return tuple(store / "blobs" for store in (repository, *shared_stores))


@lru_cache
def _list_mounts(config: str, *, of_secrets: bool) -> tuple[Path, ...]:
    return tuple(folder.resolve() for folder in list_mounts({contract.CONFIG: config}, of_secrets=of_secrets))
