"""Creates and caches virtual environments for other training tools, whose requirements differ from ours."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from environment import Installer, build_uv_environment, find_verified_wheel_folders
from local_wheels import UnknownWheel, select_torch_lock
from lockfile import LOCKS, read_locks


class NotInstalled(Exception):
    """Raised if a tool cannot be installed; the message contains the cause."""


def read_version(tool: str, lock: str) -> str:
    """Return the version of a tool in a lock file."""
    (version,) = (package.version for package in read_locks((lock,)) if package.name == tool)
    return version


def ensure_python(cache: Path, tool: str, *, lock: str) -> Path:
    """Return the Python interpreter of a tool's environment; create the environment if it does not exist.

    Raises: NotInstalled
    """
    folder = cache / "peers" / f"{tool}-{read_version(tool, lock)}"
    python, marker = folder / "bin" / "python", folder / "complete"
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder)
        install_tool(folder, cache, lock)
        marker.touch()
    return python


def install_tool(folder: Path, cache: Path, lock: str) -> None:
    """Install a lock file, which contains all requirements, with the torch of our own environment.

    Raises: NotInstalled
    """
    try:
        wheel_folders = find_verified_wheel_folders()
    except UnknownWheel as error:
        raise NotInstalled(str(error)) from error
    torch = select_torch_lock(wheel_folders, python=sys.version_info[:2], chosen=os.environ.get("TORCH", ""))
    installer = Installer(Path(sys.executable).with_name("uv"), cache / "uv", wheel_folders)
    for names in (("setuptools",), (lock, torch)):
        run_installer([*installer.build_command(folder, [LOCKS / f"{name}.txt" for name in names]), "--no-deps"])


def run_installer(command: list[str | Path]) -> None:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=build_uv_environment(os.environ)
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalled("installing took more than 900 s") from error
    if process.returncode != 0:
        raise NotInstalled(f"cannot be installed: {' '.join(process.stderr.split())[:300]}")
