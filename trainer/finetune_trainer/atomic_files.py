"""Files that are either wholly there or not at all."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_supervisor.failures.full_volumes import is_full
from finetune_trainer.errors import DiskFull, OutputError, StorageFault, TrainerError, causes, first_line

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FAILED = (errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.EUCLEAN)


def write_json(path: Path, value: object, *, beside: Path | None = None) -> None:
    """Replaced in one rename. `beside` names the file that is renamed, where its name matters."""
    staged = beside or path.with_name(f".tmp-{path.name}")
    with staged.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Every file and folder below is on the disk when this returns, readable for whom the umask allows."""
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~mask)  # safetensors makes its files private
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """The names in it; a file system that cannot sync folders (some network ones) is left alone."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn what a full or closed disk raises into DiskFull and OutputError; its other faults stay what they are.

    safetensors says why it could not write in words, torch not at all.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        number = _number(error)
        if number is None and is_full(folder):
            number = errno.ENOSPC
        if number is None or number not in (*_FULL, *_CLOSED):
            raise
        why = os.strerror(number)
        if number in _FULL:
            raise DiskFull(f"{folder} is full ({why})") from error
        raise OutputError(
            f"{folder} cannot be written ({why}); let the trainer's user write there or choose another claim"
        ) from error


@contextmanager
def storage_blamed() -> Iterator[None]:
    """Turn whatever a file system that failed led to into StorageFault: rows and weights seemed to be wrong."""
    try:
        yield
    except Exception as error:
        if not is_storage_fault(error):
            raise
        raise StorageFault(first_line(error)) from error


def is_storage_fault(error: BaseException) -> bool:
    """Whether it, or what it was raised for, is an error of a file system and not of what it holds."""
    return any(_number(cause) in _FAILED for cause in causes(error))


def _number(error: BaseException) -> int | None:
    """That of the system, which Rust's libraries give in their words."""
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else None
