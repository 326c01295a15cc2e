"""The Python environment of `make`: shared by all checkouts, named after what is installed in it, made once.

Standard library only: this runs before anything is installed.
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
WHEELS = ROOT.parent / "shared" / "wheels"  # wheels kept beside the checkout, such as torch without CUDA
UV = "uv==0.13.8"  # installs in seconds what takes pip minutes
UNUSED_DAYS = 7
FROM_PIP = ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")  # settings for pip that uv understands under its own prefix


def main() -> int:
    """Make the environment if it is not complete, and forget those of other branches that nobody used for long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _marker(folder).exists():
            started = time.monotonic()
            make_environment(folder)
            print(f"python environment: {time.monotonic() - started:.0f} s ({folder})")
        prune(folder.parent, unused_since=time.time() - UNUSED_DAYS * 86_400)
    return 0


def make_environment(folder: Path) -> None:
    """A half-made one of an interrupted run has no marker and is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], check=True)
    # Compiled now: a rank imports for 19 s without and 8 s with it, and some machines forbid to compile later.
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
    """The machine's settings for pip, so that mirrors and folders of wheels need not be told twice."""
    told = {f"UV_{name}": environment[f"PIP_{name}"] for name in FROM_PIP if f"PIP_{name}" in environment}
    return {**told, **environment}


def requirements(pyproject: Path) -> tuple[str, ...]:
    """What the project and all its extras need, without the project: checkouts share the environment."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    return tuple(project["dependencies"]) + tuple(
        line for extra in ("operator", "trainer", "cli", "dev") for line in extras[extra]
    )


def prune(folder: Path, *, unused_since: float) -> None:
    """Delete what an interrupted run left, and environments whose marker `make` has not touched since then."""
    for path in folder.iterdir():
        if path.is_dir() and not (_marker(path).exists() and _marker(path).stat().st_mtime > unused_since):
            shutil.rmtree(path)


def _marker(folder: Path) -> Path:
    return folder / "complete"


if __name__ == "__main__":
    sys.exit(main())
