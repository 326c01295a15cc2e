"""Prints the logs of all nodes to the terminal, with the node as a prefix of each line (`finetune run --logs`)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

POLL_INTERVAL_SECONDS = 0.3


class ConsoleLogs:
    """Follows the console logs of all nodes in a folder, skipping lines of earlier runs."""

    def __init__(self, folder: Path, *, print_line: Callable[[str], None]) -> None:
        self._folder = folder
        self._print_line = print_line
        self._offsets: dict[Path, int] = {path: path.stat().st_size for path in self._find_console_files()}
        self._partial_lines: dict[Path, bytes] = {}  # incomplete last line of each file

    async def follow(self) -> None:
        """Print new lines until cancelled."""
        while True:
            self.print_new_lines()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    def print_new_lines(self) -> None:
        """Print the complete lines that were written since the last call."""
        for path in self._find_console_files():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                chunk = file.read()
            self._offsets[path] = self._offsets.get(path, 0) + len(chunk)
            *lines, self._partial_lines[path] = (self._partial_lines.get(path, b"") + chunk).split(b"\n")
            for line in lines:
                # progress bars overwrite their line with carriage returns; print only the last state
                text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
                self._print_line(f"{path.parent.name} | {text}")

    def _find_console_files(self) -> list[Path]:
        return sorted(self._folder.glob("attempt-*/node-*/console.log"))
