"""Run external programs and report each failure as a single error message."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class HarnessError(Exception):
    """Raised if the test harness cannot continue; the message is written for the person who started it."""


def run(
    *argv: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Run a program that must succeed and return its standard output.

    `environment` is added to the environment of this process.

    Raises:
        HarnessError: the program is not installed or its exit code is not 0.
    """
    result = try_run(*argv, cwd=cwd, environment=environment, stdin=stdin)
    if result.returncode != 0:
        streams = (result.stdout, result.stderr)
        output = "\n".join(text.strip()[-1500:] for text in streams if text.strip()) or "no output"
        command = " ".join(str(word) for word in argv)[:200]
        raise HarnessError(f"`{command}` ended with {result.returncode}: {output}")
    return result.stdout


def try_run(
    *argv: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that may fail; the caller checks `returncode`."""
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
    except FileNotFoundError as error:
        raise HarnessError(f"`{argv[0]}` is not installed") from error


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Print a title to stderr before the block runs, and the duration of the block afterwards."""
    started_at = time.monotonic()
    print(f"{title} ...", file=sys.stderr, flush=True)
    yield
    print(f"{title}: {time.monotonic() - started_at:.1f} s", file=sys.stderr, flush=True)
