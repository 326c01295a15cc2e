"""Write files atomically and durably, and translate file system errors into TrainerErrors."""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from finetune_supervisor.failures.full_volumes import is_volume_full
from finetune_supervisor.safe_files import open_below, open_folder
from finetune_trainer.errors import DiskFull, OutputError, StorageFault, TrainerError, first_line
from finetune_trainer.storage_faults import FILE_FAILED, find_errno, is_storage_fault

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_LINK_FOUND = (errno.ELOOP, errno.ENOTDIR)  # of os.open with O_NOFOLLOW


def write_json(path: Path, value: object, *, staging_file: Path | None = None, durable: bool = True) -> None:
    """Write JSON to a new staging file, flush it to disk unless `durable` is False, and rename it to `path`.

    Folders are created, and links are not followed. staging_file: by default `.tmp-NAME` in the same folder.
    """
    staging_file = staging_file or path.with_name(f".tmp-{path.name}")
    with open_folder(path.parent) as folder, open_folder(staging_file.parent) as staging_folder:
        with suppress(FileNotFoundError):
            os.unlink(staging_file.name, dir_fd=staging_folder)
        with open(open_below(staging_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(staging_file.name, path.name, src_dir_fd=staging_folder, dst_dir_fd=folder)
    if durable:
        fsync_folder(path.parent)


def check_no_links(folders: Iterable[Path]) -> None:
    """Check that no existing folder is a link or below one. Raises: OutputError."""
    for folder in folders:
        with suppress(FileNotFoundError), translate_disk_errors(folder), open_folder(folder, create=False):
            pass


def fsync_tree(folder: Path) -> None:
    """Flush a folder and its contents to disk, and set the file modes according to the umask."""
    paths = sorted(folder.rglob("*"))
    fsync_files(path for path in paths if path.is_file())
    for path in (*paths, folder):
        if path.is_dir():
            fsync_folder(path)


def fsync_files(paths: Iterable[Path]) -> None:
    """Flush files to disk, and set their modes according to the umask."""
    mask = os.umask(0)
    os.umask(mask)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fchmod(descriptor, 0o666 & ~mask)  # safetensors creates files with mode 0600
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk; ignore errors of file systems that do not support it (some NFS)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_path(path: Path) -> None:
    """Remove a file, a symbolic link or a folder with its contents; a missing path is ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def translate_disk_errors(folder: Path) -> Iterator[None]:
    """Translate errors to DiskFull, OutputError (no permission, planted links) or StorageFault; others are unchanged.

    safetensors reports the errno only in its message. torch.save does not report it; the free space is checked instead.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if is_storage_fault(error) or find_errno(error) in FILE_FAILED:  # errors of open files do not name them
            place = "" if getattr(error, "filename", None) else f"{folder}: "
            raise StorageFault(f"{place}{first_line(error)}") from error
        code = find_errno(error)
        if code is None and is_volume_full(folder):
            code = errno.ENOSPC
        if code in _LINK_FOUND:
            path = str(getattr(error, "filename", None) or folder)
            raise OutputError(
                f"{path} is a link or a file, but the trainer only writes to folders; move it away"
            ) from error
        if code is None or code not in (*_NO_SPACE, *_NOT_WRITABLE):
            raise
        reason = os.strerror(code)
        if code in _NO_SPACE:
            raise DiskFull(f"{folder} is full ({reason})") from error
        raise OutputError(
            f"{folder} cannot be written ({reason}); let the trainer's user write there or choose another claim"
        ) from error
