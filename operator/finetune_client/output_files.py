"""Reads files of a job's output and copies folders to this machine."""

import asyncio
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path, PurePosixPath

from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_client.output_reader import OutputPod, open_output_pod
from finetune_client.pod_exec import run_in_pod

RESULT = "result"


async def read_output_file(connection: ClusterConnection, job: Job, path: str) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file of the output, such as result/report.html.

    Raises:
        ClientError: The file does not exist, or the output cannot be read.
    """
    relative = check_path(path)
    async with open_output_pod(connection, job) as pod:
        program = ("cat", f"{pod.folder}/{relative}")
        async with aclosing(run_in_pod(connection, namespace=job.namespace, pod=pod.name, program=program)) as chunks:
            async for chunk in chunks:
                yield chunk


async def download_output(connection: ClusterConnection, job: Job, path: str, destination: Path) -> Path:
    """Copy a file or folder of the output to `destination`, which must not exist, and return it.

    It is copied to a temporary folder beside the destination and renamed at the end, so that an error leaves nothing.

    Raises:
        ClientError: The path does not exist, the output cannot be read, or the destination cannot be written.
    """
    relative = check_path(path)
    partial = _make_partial_folder(destination)
    try:
        async with open_output_pod(connection, job) as pod:
            await _extract(_stream_tar(connection, job, pod, relative), partial)
        partial.chmod(0o755)  # mkdtemp forbids access by others
        (partial / relative.name if relative.name else partial).rename(destination)
    except (OSError, tarfile.TarError) as error:
        raise ClientError(f"{destination}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return destination


def _make_partial_folder(destination: Path) -> Path:
    if destination.exists():
        raise ClientError(f"{destination}: exists already; choose another destination, or remove it")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    except OSError as error:
        raise ClientError(f"{destination}: {error}") from error


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


async def _extract(chunks: AsyncIterator[bytes], folder: Path) -> None:
    """Extract a tar archive that arrives in chunks, without links and devices that leave the folder."""
    read_end, write_end = os.pipe()
    extraction = asyncio.create_task(asyncio.to_thread(_extract_archive, read_end, folder))
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


def _extract_archive(read_end: int, folder: Path) -> None:
    with os.fdopen(read_end, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(folder, filter="data")
