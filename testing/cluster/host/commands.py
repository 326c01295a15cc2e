"""Running other programs, and saying in one line why one failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class ClusterError(Exception):
    """The harness cannot go on; the message is for the person who started it."""


def run(
    *argv: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Standard output of a program that must succeed; `environment` is added to ours."""
    result = attempt(*argv, cwd=cwd, environment=environment, stdin=stdin)
    if result.returncode != 0:
        said = "\n".join(text.strip()[-1500:] for text in (result.stdout, result.stderr) if text.strip()) or "no output"
        shown = " ".join(str(word) for word in argv)[:200]
        raise ClusterError(f"`{shown}` ended with {result.returncode}: {said}")
    return result.stdout


def attempt(
    *argv: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that may fail; the caller looks at `returncode`."""
    try:
        return subprocess.run(
            [str(word) for word in argv],
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as missing:
        raise ClusterError(f"`{argv[0]}` is not installed") from missing


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Say on stderr what goes on and how long it took."""
    started = time.monotonic()
    print(f"{title} ...", file=sys.stderr, flush=True)
    yield
    print(f"{title}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
