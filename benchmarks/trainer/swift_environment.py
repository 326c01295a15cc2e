"""An environment for ms-swift, whose requirements are not ours; made once and kept in the cache."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from environment import ROOT, WHEELS, uv_environment

VERSION = "4.6.0"
FOR_IMAGES = ("qwen-vl-utils",)
CONSTRAINED = ("torch==",)  # the build that our environment has


class NotInstalled(Exception):
    """ms-swift cannot be had here; the message says why."""


def obtain_python(cache: Path) -> Path:
    """Raises NotInstalled."""
    folder = cache / "peers" / f"ms-swift-{VERSION}"
    python, marker = folder / "bin" / "python", folder / "complete"
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder)
        install(python, cache)
        marker.touch()
    return python


def install(python: Path, cache: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    options: list[str | Path] = ["--quiet", "--system-certs", "--python", python, "--cache-dir", cache / "uv"]
    options += ["--find-links", WHEELS] if WHEELS.is_dir() else []
    command = [uv, "pip", "install", *options, f"ms-swift=={VERSION}", *FOR_IMAGES, *pinned(ROOT / "constraints.txt")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=uv_environment(os.environ))
    except subprocess.TimeoutExpired as error:
        raise NotInstalled("installing took more than 900 s") from error
    if done.returncode != 0:
        raise NotInstalled(f"cannot be installed: {' '.join(done.stderr.split())[:300]}")


def pinned(constraints: Path) -> tuple[str, ...]:
    """What both must have in the same version, or they would not be compared."""
    return tuple(line for line in constraints.read_text().splitlines() if line.startswith(CONSTRAINED))
