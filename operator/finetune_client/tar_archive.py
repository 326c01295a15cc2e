"""Extracts a tar archive that a pod of a job has packed, without trust in its contents."""

import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from finetune_client.errors import ClientError

MAX_HEADER_BYTES = 32 * 1024  # of one member: names of 4,096 bytes for it and its target, and the block that is read


@dataclass(frozen=True)
class CopyLimits:
    """Largest result that is copied: bytes of all files, and number of files, folders and links in it."""

    max_bytes: int = 2**40
    max_entries: int = 100_000
    remedy: str = ""  # end of the error for a larger result, such as what raises the limits


class _MeteredStream:
    """A stream that fails when more is read than was allowed for the next part of the archive."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.allowed_bytes = MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self.allowed_bytes -= len(content)
        if self.allowed_bytes < 0:
            raise ClientError(f"the archive has a header of more than {MAX_HEADER_BYTES} bytes")
        return content


def extract_archive(stream: BinaryIO, folder: Path, *, name: str, limits: CopyLimits) -> None:
    """Extract an archive whose only top-level member is `name` into an empty folder; "": any members.

    Links inside of that member are created last, so that no other member is written through one.

    Raises:
        ClientError: A member is refused, or a limit is exceeded.
        OSError, tarfile.TarError: The archive is damaged, or a file cannot be written.
    """
    root = PurePosixPath(name)
    metered = _MeteredStream(stream)
    links: list[tarfile.TarInfo] = []
    try:
        with tarfile.open(fileobj=metered, mode="r|") as archive:  # type: ignore[call-overload]  # it needs only read
            members = _check_members(archive, metered, folder, root, limits, links)
            archive.extractall(folder, members, filter="data")
        for link in links:
            _create_link(link, folder.resolve(), root)
    except (ValueError, ArithmeticError, LookupError) as error:  # of wrong names, times and numbers in headers
        raise ClientError(f"the archive is damaged: {error}") from error


def _check_members(
    archive: tarfile.TarFile,
    metered: _MeteredStream,
    folder: Path,
    root: PurePosixPath,
    limits: CopyLimits,
    links: list[tarfile.TarInfo],
) -> Iterator[tarfile.TarInfo]:
    """Yield the members that tarfile may extract, and collect the symbolic links."""
    entries = size = 0
    while (member := archive.next()) is not None:
        path = PurePosixPath(member.name)
        _check_member(member, path, folder, root)
        entries, size = entries + (path != root), size + (member.size if member.isreg() else 0)
        if entries > limits.max_entries or size > limits.max_bytes:
            bounds = f"{limits.max_entries} entries or {limits.max_bytes} bytes"
            raise ClientError(f"the copy has more than {bounds}{limits.remedy}")
        # release the memory of many headers
        member.pax_headers, archive.pax_headers, archive.members = {}, {}, []  # type: ignore[attr-defined]  # typeshed
        if member.issym():
            links.append(member)
        else:
            metered.allowed_bytes = member.size + MAX_HEADER_BYTES
            yield member
        metered.allowed_bytes = MAX_HEADER_BYTES


def _check_member(member: tarfile.TarInfo, path: PurePosixPath, folder: Path, root: PurePosixPath) -> None:
    """Raise ClientError for a member that is not part of the copy, or is of a refused kind."""
    if path.is_absolute() or ".." in path.parts or not path.is_relative_to(root):
        raise ClientError(f"{member.name}: the archive contains it, but {root} was requested")
    if path == root and (member.issym() or member.islnk()):
        raise ClientError(f"{root} is a link to {member.linkname}; copy the path to which it refers")
    is_known = member.isreg() or member.isdir() or member.issym() or member.islnk()
    if not is_known or member.issparse() or member.size < 0:
        raise ClientError(f"{member.name}: is a sparse, special or damaged file, which is not copied")
    if member.islnk() and not (folder / member.linkname).is_file():
        raise ClientError(f"{member.name}: is a hard link to {member.linkname}, which is no file of the copy")
    if member.isreg() and member.size > (free := shutil.disk_usage(folder).free):
        raise ClientError(f"{member.name}: has {member.size} bytes, but only {free} are free on this machine")


def _create_link(link: tarfile.TarInfo, folder: Path, root: PurePosixPath) -> None:
    """Create a symbolic link whose target is below the root.

    Only the beginning of a target may contain `..`: its folder contains no link, as opposed to those of the target.
    """
    path, target = PurePosixPath(link.name), PurePosixPath(link.linkname)
    ascents = next((index for index, part in enumerate(target.parts) if part != ".."), len(target.parts))
    depth = len(path.relative_to(root).parts) - 1
    if target.is_absolute() or ascents > depth or ".." in target.parts[ascents:]:
        raise ClientError(f"{link.name}: is a link to {link.linkname}, which is outside of {root}")
    parent = folder / path.parent
    parent.mkdir(parents=True, exist_ok=True)
    if parent.resolve() != parent:
        raise ClientError(f"{link.name}: is inside of a link")
    os.symlink(link.linkname, parent / path.name)
