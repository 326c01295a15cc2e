"""Opens files below the output's mount point, where others can write too, without following links (decisions/312)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from finetune_supervisor.contract import CACHE_DIR

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def open_folder(path: Path, *, create: bool = True) -> Iterator[int]:
    """Yield a descriptor of a folder, for os functions with dir_fd.

    Neither the folder nor a component below the mount point may be a link; outside of the mount point, the folder may
    be one. create: whether missing folders are created. Raises: OSError, ELOOP or ENOTDIR for a link.
    """
    mount = Path(os.environ[CACHE_DIR]).parent if CACHE_DIR in os.environ else path
    opened = mount if path.is_relative_to(mount) else path
    if create:
        opened.mkdir(parents=True, exist_ok=True)
    folder = os.open(opened, _FOLDER)
    try:
        for name in path.relative_to(opened).parts:
            opened /= name
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
            try:
                child = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(opened)) from error
            os.close(folder)
            folder = child
        yield folder
    finally:
        os.close(folder)


def open_below(path: Path, flags: int, *, create_folder: bool = True) -> int:
    """Open a regular file in a folder as open_folder does; the file may be no link either. Raises: OSError."""
    # do not wait for a reader of a pipe that somebody else created
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open_folder(path.parent, create=create_folder) as folder:
        descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor
