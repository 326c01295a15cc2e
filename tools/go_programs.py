"""Find a program that is built from its Go module, in the pinned version or else as it is installed."""

import shutil
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.versions import PINNED
from testing.cluster.images.go_build import build_all


def find_program(name: str, version: str) -> Path | None:
    """Return the path of a program, or None if it is not installed and cannot be built; the first build takes minutes.

    name: of the program and of its component in testing.cluster.images.go_build.
    """
    pinned = Cache.from_environment().get_binary_folder(name, version) / name
    if not pinned.exists() and shutil.which("go"):
        build_all(Cache.from_environment(), PINNED, component_names=(name,))
    if pinned.exists():
        return pinned
    installed = shutil.which(name)
    return Path(installed) if installed else None
