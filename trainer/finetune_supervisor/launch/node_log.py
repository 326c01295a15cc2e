"""Copies the output of a node to its log files on the claim."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from finetune_supervisor.background_tasks import BackgroundTasks

FILE_BYTES = 320 * 2**20  # of each of three files: the start of the output, and two with its end


class NodeLog:
    """Log of a node: `node-R.log`, then the last two files of its end, `node-R.tail.previous.log` and `.tail.log`."""

    def __init__(self, path: Path) -> None:
        self.tasks = BackgroundTasks("node log")
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, chunk: bytes) -> None:
        """Append a chunk of the output, in the thread."""
        self.tasks.add(partial(self._append, chunk))

    def _append(self, chunk: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        elif self._file.tell() >= FILE_BYTES:
            tail = self._path.with_suffix(".tail.log")
            self._file.write(f"supervisor: this log continues in {tail.name}\n".encode())
            with suppress(FileNotFoundError):
                tail.replace(tail.with_suffix(".previous.log"))
            full_file, self._file = self._file, tail.open("ab", buffering=0)
            full_file.close()
        rest = memoryview(chunk)
        while rest:  # a write to a volume that becomes full may be a part
            rest = rest[self._file.write(rest) :]
