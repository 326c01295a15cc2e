"""An error of full volumes says which."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune_supervisor.failures.full_volumes import name_full

FREE = {"/shm": 0, "/tmp": 4096, "/output": 2**30}
FOLDERS = [Path(folder) for folder in FREE]


@pytest.fixture(autouse=True)
def volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(folder: Path) -> SimpleNamespace:
        if str(folder) not in FREE:
            raise FileNotFoundError(folder)
        return SimpleNamespace(f_blocks=2**20, f_frsize=4096, f_bavail=FREE[str(folder)] // 4096)

    monkeypatch.setattr(os, "statvfs", statvfs)


@pytest.mark.parametrize(
    "message", ["[Errno 28] No space left on device", "Disk quota exceeded", "ended by signal 7 (SIGBUS)"]
)
def test_full_volumes_are_named(message: str) -> None:
    assert name_full(message, [*FOLDERS, Path("/none")]) == f"{message} (full: /shm, /tmp)"


def test_a_volume_that_is_named_already_is_not_named_again() -> None:
    message = "/output is full (No space left on device)"
    assert name_full(message, [Path("/shm")]) == f"{message} (full: /shm)"
    assert name_full("/shm is full (No space left on device)", [Path("/shm")]).endswith("on device)")


def test_a_volume_with_room_is_not_blamed() -> None:
    message = "[Errno 28] No space left on device"
    assert name_full(message, [Path("/output")]) == message


def test_other_errors_say_nothing_of_volumes() -> None:
    assert name_full("KeyError: 'messages'", FOLDERS) == "KeyError: 'messages'"
