"""`--logs`: the nodes' own lines on the terminal, each with its node."""

import asyncio
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_SECONDS = 0.3


class ConsoleLogs:
    """Follows the console of every node below a folder; what is there already is of an earlier run."""

    def __init__(self, folder: Path, *, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._read: dict[Path, int] = {path: path.stat().st_size for path in self._consoles()}
        self._begun: dict[Path, bytes] = {}  # lines without their end yet

    async def follow(self) -> None:
        """For ever."""
        while True:
            self.print_new()
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    def print_new(self) -> None:
        """Whole lines that were written since the last look."""
        for path in self._consoles():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                chunk = file.read()
            self._read[path] = self._read.get(path, 0) + len(chunk)
            *lines, self._begun[path] = (self._begun.get(path, b"") + chunk).split(b"\n")
            for line in lines:
                # a progress bar rewrites its line; what it came to is enough
                text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
                self._say(f"{path.parent.name} | {text}")

    def _consoles(self) -> list[Path]:
        return sorted(self._folder.glob("attempt-*/node-*/console.log"))
