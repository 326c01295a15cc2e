"""Installs a folder of wheels without a package index. Uses the standard library only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_BYTES = 60_000_000


class WheelFolderRejected(Exception):
    """Raised for a folder that is empty or too large; the message contains the folder and the numbers."""


def check_wheel_folder(folder: Path) -> list[Path]:
    """Return the wheels of a folder. Raises: WheelFolderRejected if there are none, or more than 60 MB."""
    wheels = sorted(folder.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    if not wheels:
        raise WheelFolderRejected(f"{folder} contains no wheels; `make gpu-check-wheels` downloads them")
    if total > MAX_BYTES:
        largest = max(wheels, key=lambda wheel: wheel.stat().st_size)
        raise WheelFolderRejected(
            f"{folder} contains {total / 1e6:.1f} MB of wheels, more than {MAX_BYTES / 1e6:.0f} MB; the largest is"
            f" {largest.name} with {largest.stat().st_size / 1e6:.1f} MB"
        )
    return wheels


def install_wheels(folder: Path, target: Path) -> None:
    """Install the wheels into the target folder, without their dependencies and without a package index.

    Raises: WheelFolderRejected, or subprocess.CalledProcessError if pip fails
    """
    wheels = check_wheel_folder(folder)
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, *wheels], check=True)
    # Otherwise every process compiles the modules again, or several do so at the same time.
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j", "0", target], check=False, stdout=subprocess.DEVNULL
    )
