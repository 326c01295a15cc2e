"""Create the Python environment for `make`, which all checkouts with the same lock files share.

It uses only the standard library, because it runs before packages are installed.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from local_wheels import UnknownWheel, find_wheel_folders, select_torch_lock, verify_local_wheels
from lockfile import LOCKS, read_locks

ROOT = Path(__file__).resolve().parent.parent
DEVELOPMENT_LOCKS = ("operator", "cli", "mcp", "trainer", "dev", "hatchling")  # and torch or torch-cpu
UNUSED_DAYS = 7
PIP_SETTING_NAMES = ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")  # pip settings that uv supports with the prefix UV_


def main() -> int:
    """Create the environment if it is missing or incomplete, and delete unused environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _get_marker(folder).exists():
            started_at = time.monotonic()
            create_environment(folder)
            print(f"python environment: {time.monotonic() - started_at:.0f} s ({folder})")
        delete_unused_environments(folder.parent, unused_since=time.time() - UNUSED_DAYS * 86_400)
    return 0


def create_environment(folder: Path) -> None:
    """Create the environment, or replace an incomplete environment; the marker is written last.

    Raises: SystemExit if a local wheel is not in the lock files
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        wheel_folders = find_verified_wheel_folders()
        torch = select_torch_lock(wheel_folders, python=sys.version_info[:2], chosen=os.environ.get("TORCH", ""))
    except (UnknownWheel, ValueError) as error:
        raise SystemExit(str(error)) from None
    venv.create(folder, with_pip=True)
    install_uv(folder)
    installer = Installer(uv=folder / "bin" / "uv", cache=folder.parent.parent / "uv", wheel_folders=wheel_folders)
    for names in (("setuptools",), (*DEVELOPMENT_LOCKS, torch)):
        command = installer.build_command(folder, [LOCKS / f"{name}.txt" for name in names])
        subprocess.run(command, check=True, env=build_uv_environment(os.environ))
    _get_marker(folder).touch()


def install_uv(folder: Path) -> None:
    """Install the locked version of uv into an environment that contains pip."""
    options = ("--quiet", "--disable-pip-version-check", "--require-hashes", "--requirement", LOCKS / "uv.txt")
    subprocess.run((folder / "bin" / "python", "-m", "pip", "install", *options), check=True)


def find_verified_wheel_folders() -> tuple[Path, ...]:
    """Return the folders with wheels, after the wheels in them were compared with the lock files.

    Raises: UnknownWheel
    """
    folders = find_wheel_folders(ROOT, os.environ)
    verify_local_wheels(folders, read_locks())
    return folders


@dataclass(frozen=True)
class Installer:
    """uv, which installs packages in seconds instead of minutes, with its cache and folders with wheels."""

    uv: Path
    cache: Path
    wheel_folders: tuple[Path, ...] = ()

    def build_command(self, folder: Path, locks: Sequence[Path]) -> list[str | Path]:
        """Return the command that installs lock files into an environment; every artefact needs a locked sha256.

        Packages without a wheel are built with the environment's setuptools, because build isolation would install
        build backends without verification.
        """
        # compile now, because the folder may become read-only; bytecode reduces a rank's import time from 19 s to 8 s
        options: list[str | Path] = ["--quiet", "--system-certs", "--compile-bytecode", "--cache-dir", self.cache]
        options += ["--require-hashes", "--no-build-isolation", "--python", folder / "bin" / "python"]
        options += [word for wheels in self.wheel_folders for word in ("--find-links", wheels)]
        return [self.uv, "pip", "install", *options, *(word for lock in locks for word in ("--requirement", lock))]


def build_uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables, with pip's settings (mirrors, wheel folders) also set for uv."""
    uv_settings = {
        f"UV_{name}": environment[f"PIP_{name}"] for name in PIP_SETTING_NAMES if f"PIP_{name}" in environment
    }
    return {**uv_settings, **environment}


def delete_unused_environments(folder: Path, *, unused_since: float) -> None:
    """Delete incomplete environments, and environments whose marker is older than `unused_since` (Unix time)."""
    for path in folder.iterdir():
        if path.is_dir() and not (_get_marker(path).exists() and _get_marker(path).stat().st_mtime > unused_since):
            shutil.rmtree(path)


def _get_marker(folder: Path) -> Path:
    return folder / "complete"


if __name__ == "__main__":
    sys.exit(main())
