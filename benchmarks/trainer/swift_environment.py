"""Creates and caches a virtual environment for ms-swift, whose requirements differ from ours."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from environment import ROOT, WHEELS, build_uv_environment

VERSION = "4.6.0"
IMAGE_PACKAGES = ("qwen-vl-utils",)
CONSTRAINED_PACKAGES = ("torch==",)  # packages that must have the same version as in our environment


class NotInstalled(Exception):
    """Raised if ms-swift cannot be installed; the message contains the cause."""


def ensure_python(cache: Path) -> Path:
    """Return the Python interpreter of the environment; create the environment if it does not exist.

    Raises: NotInstalled
    """
    folder = cache / "peers" / f"ms-swift-{VERSION}"
    python, marker = folder / "bin" / "python", folder / "complete"
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder)
        install_swift(python, cache)
        marker.touch()
    return python


def install_swift(python: Path, cache: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    options: list[str | Path] = ["--quiet", "--system-certs", "--python", python, "--cache-dir", cache / "uv"]
    options += ["--find-links", WHEELS] if WHEELS.is_dir() else []
    command = [
        uv,
        "pip",
        "install",
        *options,
        f"ms-swift=={VERSION}",
        *IMAGE_PACKAGES,
        *read_pinned_constraints(ROOT / "constraints.txt"),
    ]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=build_uv_environment(os.environ)
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalled("installing took more than 900 s") from error
    if process.returncode != 0:
        raise NotInstalled(f"cannot be installed: {' '.join(process.stderr.split())[:300]}")


def read_pinned_constraints(constraints: Path) -> tuple[str, ...]:
    """Return the constraints of packages that must have the same version as ours for a fair comparison."""
    return tuple(line for line in constraints.read_text().splitlines() if line.startswith(CONSTRAINED_PACKAGES))
