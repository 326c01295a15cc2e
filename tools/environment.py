"""Create the Python environment of `make`, which is shared by all checkouts with the same requirements.

Uses only the standard library, because it runs before anything is installed.
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
WHEELS = ROOT.parent / "shared" / "wheels"  # optional wheels beside the checkout, such as torch without CUDA
UV = "uv==0.13.8"  # installs in seconds instead of minutes
UNUSED_DAYS = 7
FROM_PIP = ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")  # pip settings that uv accepts with its own prefix


def main() -> int:
    """Create the environment if it is missing or incomplete, and delete environments that have not been used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _marker(folder).exists():
            started_at = time.monotonic()
            create_environment(folder)
            print(f"python environment: {time.monotonic() - started_at:.0f} s ({folder})")
        prune(folder.parent, unused_since=time.time() - UNUSED_DAYS * 86_400)
    return 0


def create_environment(folder: Path) -> None:
    """Create the environment from scratch; an interrupted creation leaves no marker and is repeated."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], check=True)
    # Compile bytecode now: imports of a rank take 8 s instead of 19 s, and the folder may be read-only later.
    options: list[str | Path] = ["--quiet", "--system-certs", "--compile-bytecode", "--python", python]
    options += ["--cache-dir", folder.parent.parent / "uv", "--constraint", ROOT / "constraints.txt"]
    options += ["--find-links", WHEELS] if WHEELS.is_dir() else []
    subprocess.run(
        [folder / "bin" / "uv", "pip", "install", *options, *requirements(ROOT / "pyproject.toml")],
        check=True,
        env=uv_environment(os.environ),
    )
    _marker(folder).touch()


def uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the host's pip settings (mirrors, wheel folders) also set for uv."""
    uv_settings = {f"UV_{name}": environment[f"PIP_{name}"] for name in FROM_PIP if f"PIP_{name}" in environment}
    return {**uv_settings, **environment}


def requirements(pyproject: Path) -> tuple[str, ...]:
    """Return the requirements of the project and its extras, without the project itself."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    return tuple(project["dependencies"]) + tuple(
        line for extra in ("operator", "trainer", "cli", "dev") for line in extras[extra]
    )


def prune(folder: Path, *, unused_since: float) -> None:
    """Delete incomplete environments, and those whose marker `make` has not touched since `unused_since`."""
    for path in folder.iterdir():
        if path.is_dir() and not (_marker(path).exists() and _marker(path).stat().st_mtime > unused_since):
            shutil.rmtree(path)


def _marker(folder: Path) -> Path:
    return folder / "complete"


if __name__ == "__main__":
    sys.exit(main())
