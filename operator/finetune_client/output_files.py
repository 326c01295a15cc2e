"""Reads files of a job's output and copies folders to this machine."""

import asyncio
import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path, PurePosixPath

from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_client.output_reader import OutputPod, open_output_pod
from finetune_client.pod_exec import run_in_pod
from finetune_client.tar_archive import CopyLimits, extract_archive

RESULT = "result"
CHUNK_BYTES = 2**20
DEFAULT_LIMITS = CopyLimits()


async def read_output_file(connection: ClusterConnection, job: Job, path: str) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file of the output, such as result/report.html.

    It is copied to a temporary folder first, so that the checks of download_output apply.

    Raises:
        ClientError: The path is no file, or the output cannot be read.
    """
    check_path(path)
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        copy = await download_output(connection, job, path, Path(folder) / "copy")
        if not copy.is_file():
            raise ClientError(f"{path}: is a folder in the output of the job; finetune cp copies it")
        with copy.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk


async def download_output(
    connection: ClusterConnection, job: Job, path: str, destination: Path, limits: CopyLimits = DEFAULT_LIMITS
) -> Path:
    """Copy a file or folder of the output to `destination`, which must not exist, and return it.

    It is copied to a temporary folder beside the destination and renamed at the end, so that an error leaves nothing.

    Raises:
        ClientError: The path does not exist or is a link, the output cannot be read or exceeds the limits, or the
            destination cannot be written.
    """
    relative = check_path(path)
    try:
        with _make_partial_folder(destination) as (folder, target):
            async with open_output_pod(connection, job) as pod:
                await _extract(_stream_tar(connection, job, pod, relative), folder, relative.name, limits)
            folder.chmod(0o755)  # mkdtemp forbids access by others
            (folder / relative.name).rename(target)
    except (OSError, tarfile.TarError) as error:
        raise ClientError(f"{destination}: {error}") from error
    return destination


@contextlib.contextmanager
def _make_partial_folder(destination: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder, and the path beside it to which it is renamed; the user's own links are followed.

    At the end, remove the folder, and if the path does not exist, also the folders that were created for it.
    """
    target = Path(os.path.realpath(destination))
    if os.path.lexists(target):
        raise ClientError(f"{destination}: exists already; choose another destination, or remove it")
    missing_folders = [folder for folder in target.parents if not folder.exists()]
    with contextlib.ExitStack() as cleanup:
        for folder in reversed(missing_folders):
            folder.mkdir()
            cleanup.callback(_remove_empty, folder)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder, target


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it contains the copy
        folder.rmdir()


def check_path(path: str) -> PurePosixPath:
    """Return a path relative to the output of the job. Raises ClientError if it leaves the output."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or "\0" in path:
        raise ClientError(f"{path}: expected a path below the output of the job, such as {RESULT}")
    return relative


def _stream_tar(
    connection: ClusterConnection, job: Job, pod: OutputPod, relative: PurePosixPath
) -> AsyncIterator[bytes]:
    """Yield a tar archive of the path, whose members begin with its last part."""
    folder = f"{pod.folder}/{relative.parent}" if relative.name else pod.folder
    program = ("tar", "-C", folder, "-cf", "-", "--", relative.name or ".")
    return run_in_pod(connection, namespace=job.namespace, pod=pod.name, program=program)


async def _extract(chunks: AsyncIterator[bytes], folder: Path, name: str, limits: CopyLimits) -> None:
    """Extract a tar archive of the member `name`, which arrives in chunks."""
    read_end, write_end = os.pipe()
    extraction = asyncio.create_task(asyncio.to_thread(_extract_pipe, read_end, folder, name, limits))
    try:
        with os.fdopen(write_end, "wb", buffering=0) as pipe:
            async for chunk in chunks:
                await asyncio.to_thread(pipe.write, chunk)
    except BrokenPipeError:
        pass  # the extraction has ended, and raises its error below
    except BaseException:  # the cause of an incomplete archive, which the extraction would report instead
        await asyncio.gather(extraction, return_exceptions=True)
        raise
    await extraction


def _extract_pipe(read_end: int, folder: Path, name: str, limits: CopyLimits) -> None:
    with os.fdopen(read_end, "rb") as stream:
        extract_archive(stream, folder, name=name, limits=limits)
