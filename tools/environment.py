"""Create the Python environment for `make`, which all checkouts with the same requirements share.

It uses only the standard library, because it runs before packages are installed.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT.parent / "shared" / "wheels"  # optional wheels next to the checkout, such as torch without CUDA
UV = "uv==0.13.8"  # uv installs packages in seconds, pip in minutes
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
    """Create the environment, or replace an incomplete environment; the marker is written last."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], check=True)
    # compile now, because the folder may become read-only; bytecode reduces a rank's import time from 19 s to 8 s
    options: list[str | Path] = ["--quiet", "--system-certs", "--compile-bytecode", "--python", python]
    options += ["--cache-dir", folder.parent.parent / "uv", "--constraint", ROOT / "constraints.txt"]
    options += ["--find-links", WHEELS] if WHEELS.is_dir() else []
    subprocess.run(
        [folder / "bin" / "uv", "pip", "install", *options, *read_requirements(ROOT / "pyproject.toml")],
        check=True,
        env=build_uv_environment(os.environ),
    )
    _get_marker(folder).touch()


def build_uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables, with pip's settings (mirrors, wheel folders) also set for uv."""
    uv_settings = {
        f"UV_{name}": environment[f"PIP_{name}"] for name in PIP_SETTING_NAMES if f"PIP_{name}" in environment
    }
    return {**uv_settings, **environment}


def read_requirements(pyproject: Path) -> tuple[str, ...]:
    """Return the requirements of the project and its extras, without the project itself."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    return tuple(project["dependencies"]) + tuple(
        line for extra in ("operator", "trainer", "cli", "dev") for line in extras[extra]
    )


def delete_unused_environments(folder: Path, *, unused_since: float) -> None:
    """Delete incomplete environments, and environments whose marker is older than `unused_since` (Unix time)."""
    for path in folder.iterdir():
        if path.is_dir() and not (_get_marker(path).exists() and _get_marker(path).stat().st_mtime > unused_since):
            shutil.rmtree(path)


def _get_marker(folder: Path) -> Path:
    return folder / "complete"


if __name__ == "__main__":
    sys.exit(main())
