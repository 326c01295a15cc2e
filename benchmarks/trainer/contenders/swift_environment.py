"""Creates and caches a virtual environment for ms-swift, whose requirements differ from ours."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from environment import Installer, build_uv_environment, find_verified_wheel_folders
from local_wheels import UnknownWheel, select_torch_lock
from lockfile import LOCKS, read_locks

LOCK = "ms-swift"


class NotInstalled(Exception):
    """Raised if ms-swift cannot be installed; the message contains the cause."""


def ensure_python(cache: Path) -> Path:
    """Return the Python interpreter of the environment; create the environment if it does not exist.

    Raises: NotInstalled
    """
    (version,) = (package.version for package in read_locks((LOCK,)) if package.name == LOCK)
    folder = cache / "peers" / f"ms-swift-{version}"
    python, marker = folder / "bin" / "python", folder / "complete"
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder)
        install_swift(folder, cache)
        marker.touch()
    return python


def install_swift(folder: Path, cache: Path) -> None:
    """Install ms-swift with the torch of our own environment, for a fair comparison.

    Raises: NotInstalled
    """
    try:
        wheel_folders = find_verified_wheel_folders()
    except UnknownWheel as error:
        raise NotInstalled(str(error)) from error
    torch = select_torch_lock(wheel_folders, python=sys.version_info[:2], chosen=os.environ.get("TORCH", ""))
    installer = Installer(Path(sys.executable).with_name("uv"), cache / "uv", wheel_folders)
    for names in (("setuptools",), (LOCK, torch)):
        run_installer(installer.build_command(folder, [LOCKS / f"{name}.txt" for name in names]))


def run_installer(command: list[str | Path]) -> None:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=build_uv_environment(os.environ)
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalled("installing took more than 900 s") from error
    if process.returncode != 0:
        raise NotInstalled(f"cannot be installed: {' '.join(process.stderr.split())[:300]}")
