"""Tests of adding the names of full volumes to error messages."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune_supervisor.failures.full_volumes import append_full_volumes

FREE_BYTES = {"/shm": 0, "/tmp": 4096, "/output": 2**30}
FOLDERS = [Path(folder) for folder in FREE_BYTES]


@pytest.fixture(autouse=True)
def fake_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(folder: Path) -> SimpleNamespace:
        if str(folder) not in FREE_BYTES:
            raise FileNotFoundError(folder)
        return SimpleNamespace(f_blocks=2**20, f_frsize=4096, f_bavail=FREE_BYTES[str(folder)] // 4096)

    monkeypatch.setattr(os, "statvfs", statvfs)


@pytest.mark.parametrize(
    "message", ["[Errno 28] No space left on device", "Disk quota exceeded", "ended by signal 7 (SIGBUS)"]
)
def test_full_volumes_are_appended_to_the_message(message: str) -> None:
    assert append_full_volumes(message, [*FOLDERS, Path("/none")]) == f"{message} (full: /shm, /tmp)"


def test_volume_named_in_the_message_is_not_appended() -> None:
    message = "/output is full (No space left on device)"
    assert append_full_volumes(message, [Path("/shm")]) == f"{message} (full: /shm)"
    assert append_full_volumes("/shm is full (No space left on device)", [Path("/shm")]).endswith("on device)")


def test_volume_with_free_space_is_not_appended() -> None:
    message = "[Errno 28] No space left on device"
    assert append_full_volumes(message, [Path("/output")]) == message


def test_messages_of_other_errors_are_unchanged() -> None:
    assert append_full_volumes("KeyError: 'messages'", FOLDERS) == "KeyError: 'messages'"
