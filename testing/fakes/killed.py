"""Fakes the end of a process at one of its system calls that change folders."""

import os
from typing import Any

import pytest


class Killed(BaseException):
    """Ends a save at a system call."""


def kill_at(monkeypatch: pytest.MonkeyPatch, point: int) -> list[str]:
    """Let the calls that change a folder fail from the one with this number on, and return the list of calls."""
    calls: list[str] = []
    for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
        original = getattr(os, name)

        def call(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            if len(calls) >= point:
                raise Killed
            calls.append(_name)
            return _original(*args, **options)

        monkeypatch.setattr(os, name, call)
    return calls
