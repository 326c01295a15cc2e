"""Copies the output of a node to its log files on the claim."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from finetune_supervisor.background_tasks import BackgroundTasks
from finetune_supervisor.safe_files import open_below, open_folder

FILE_BYTES = 320 * 2**20  # of each of three files: the start of the output, and two with its end


class NodeLog:
    """Log of a node: `node-R.log`, then the last two files of its end, `node-R.tail.previous.log` and `.tail.log`."""

    def __init__(self, path: Path) -> None:
        self.tasks = BackgroundTasks("node log")
        self._path = path
        self._file: BinaryIO | None = None
        self.write(b"")  # creates the file, also if there is no output

    def write(self, chunk: bytes) -> None:
        """Append a chunk of the output, in the thread."""
        self.tasks.add(partial(self._append, chunk))

    def _append(self, chunk: bytes) -> None:
        if self._file is None:
            self._file = _open_for_append(self._path)
        elif self._file.tell() >= FILE_BYTES:
            tail = self._path.with_suffix(".tail.log")
            self._file.write(f"supervisor: this log continues in {tail.name}\n".encode())
            with open_folder(tail.parent) as folder, suppress(FileNotFoundError):
                os.rename(tail.name, tail.with_suffix(".previous.log").name, src_dir_fd=folder, dst_dir_fd=folder)
            full_file, self._file = self._file, _open_for_append(tail)
            full_file.close()
        rest = memoryview(chunk)
        while rest:  # a write to a volume that becomes full may be a part
            rest = rest[self._file.write(rest) :]


def _open_for_append(path: Path) -> BinaryIO:
    return os.fdopen(open_below(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)
