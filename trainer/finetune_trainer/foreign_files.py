"""Opens files that others may have written or replaced by links, and copies those of a model to this pod."""

import errno
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from huggingface_hub import constants

from finetune_supervisor import contract
from finetune_supervisor.failures.redact import list_mounts
from finetune_trainer.errors import ModelError, first_line

_SYSTEM_FOLDERS = tuple(map(Path, ("/proc", "/sys", "/dev", "/run/secrets", "/var/run/secrets")))
_COPIED = frozenset((".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".vocab"))
_WEIGHTS = frozenset((".safetensors", ".bin"))
_TEMPLATES = "additional_chat_templates"


class ForbiddenFile(OSError):
    """The path leads to a file that is not regular, or outside of the folders from which files may be read."""


def open_foreign(path: Path, folders: Sequence[Path] | None = None) -> BinaryIO:
    """Open a file for reading that is regular and, after its links are resolved, in one of the folders.

    folders: None for any but those of the system and of Secrets. The file that is open is checked, so that nobody can
    replace it meanwhile. Raises: ForbiddenFile, or another OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode, is_linux = os.fstat(descriptor).st_mode, sys.platform == "linux"
    target = Path(os.readlink(f"/proc/self/fd/{descriptor}")) if is_linux else path.resolve()
    is_inside = folders is None or any(target.is_relative_to(folder) for folder in folders)
    is_secret = any(target.is_relative_to(folder) for folder in _list_forbidden_folders(_get_config()))
    if stat.S_ISREG(mode) and is_inside and not is_secret:
        return os.fdopen(descriptor, "rb")
    try:
        if stat.S_ISREG(mode):
            os.pread(descriptor, 1, 0)  # an I/O error is a fault of the storage, whatever the file is
    finally:
        os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ForbiddenFile(f"{path} leads to {target}, from which the trainer reads nothing; replace it by a file")


def open_data_file(path: str | Path) -> BinaryIO:
    """Open a file of a dataset; a link may lead to its folder and to any volume with data. Raises: OSError."""
    volumes = _list_data_volumes(_get_config())
    return open_foreign(Path(path), volumes and (Path(path).parent.resolve(), *volumes))


def copy_model_files(folder: Path, subject: str) -> "TemporaryDirectory[str]":
    """Copy the texts of a model or adapter to a folder of this process, which also has links to its weights.

    Other files are left out. subject: field and value of the spec, for error messages. Raises: ModelError.
    """
    root, copy = folder.resolve(), TemporaryDirectory(prefix="model-")
    folders = (root, *_list_blob_folders(root))
    for path in sorted((*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*"))):
        if path.suffix not in _COPIED | _WEIGHTS or path.is_dir():
            continue
        target = Path(copy.name, path.relative_to(folder))
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
        except PermissionError:
            continue  # the loader reports it
    return copy


def _list_blob_folders(folder: Path) -> tuple[Path, ...]:
    """Return the folders to which huggingface_hub links the files of a snapshot in its cache."""
    repository, cache = folder.parent.parent, folder.parent.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return ()
    shared = (cache, Path(constants.HF_HUB_CACHE).resolve())
    return (repository / "blobs", *(store / "blobs" for store in shared))


def _get_config() -> str:
    return os.environ.get(contract.CONFIG, "")


@lru_cache(maxsize=1)
def _list_forbidden_folders(config: str) -> tuple[Path, ...]:
    return tuple(folder.resolve() for folder in (*_SYSTEM_FOLDERS, *list_mounts({contract.CONFIG: config}, of_secrets=True)))


@lru_cache(maxsize=1)
def _list_data_volumes(config: str) -> tuple[Path, ...] | None:
    """Return the mount points of the job's volumes and of its output; None in local mode and without a spec."""
    if contract.STATUS_HOST in os.environ or not Path(config).is_file():
        return None
    volumes = contract.parse_json(Path(config).read_bytes()).get("volumes") or ()
    output = Path(os.environ[contract.CACHE_DIR]).parent
    return (output.resolve(), *(Path(volume["mountPath"]).resolve() for volume in volumes))
