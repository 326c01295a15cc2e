"""Recognise errors of a failed file system, which no change of the job can fix, and convert them to StorageFault."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from finetune_trainer.errors import StorageFault, first_line, iterate_causes

_IO_FAILED = (errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.EUCLEAN)
# Errors of network file systems that sockets have as well, so that they are storage faults only for a known file.
FILE_FAILED = (
    *_IO_FAILED,
    *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNABORTED, errno.ECONNRESET, errno.ENOLINK),
    *(errno.ENODEV, errno.EBADMSG, errno.ENODATA, errno.EKEYEXPIRED, errno.ENOLCK, errno.EAGAIN),
    errno.EINTR,
)
_OUT_OF_RESOURCES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def raise_storage_faults() -> Iterator[None]:
    """Convert errors that are caused by a failed file system into StorageFault.

    Otherwise an I/O error while reading rows or weights would be reported as invalid data.
    """
    try:
        yield
    except Exception as error:
        if not is_storage_fault(error):
            raise
        raise StorageFault(first_line(error)) from error


def is_storage_fault(error: BaseException) -> bool:
    """Return whether the error or one of its causes is an I/O error of a file system."""
    return any(
        isinstance(cause, StorageFault)
        or find_errno(cause) in (FILE_FAILED if getattr(cause, "filename", None) else _IO_FAILED)
        for cause in iterate_causes(error)
    )


def check_is_about_content(error: BaseException, subject: str) -> None:
    """Raise an error of reading a file, unless it is about the file itself, such as its content or permissions.

    subject: the row or file, for the message of a StorageFault.
    """
    for cause in iterate_causes(error):
        number = find_errno(cause)
        if isinstance(cause, StorageFault) or number in FILE_FAILED:
            raise StorageFault(f"{subject}: {getattr(cause, 'strerror', None) or first_line(cause)}") from error
        if isinstance(cause, MemoryError) or number in _OUT_OF_RESOURCES:
            raise cause


def find_errno(error: BaseException) -> int | None:
    """Return the errno of an error; Rust libraries such as safetensors report it only in the message."""
    if isinstance(number := getattr(error, "errno", None), int):
        return number
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None
