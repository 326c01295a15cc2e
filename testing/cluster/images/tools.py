"""Find kubectl and helm, for clusters that the test harness did not start."""

from __future__ import annotations

import shutil
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.versions import PINNED
from testing.cluster.images.go_build import build_all


def find_tool(name: str, cache: Cache) -> Path:
    """Return the path of a program in PATH; if it is not installed, build it in the cache."""
    installed = shutil.which(name)
    if installed:
        return Path(installed)
    component, version = {"kubectl": ("kubernetes", PINNED.kubernetes), "helm": ("helm", PINNED.helm)}[name]
    build_all(cache, PINNED, component_names=(component,))
    return cache.get_binary_folder(component, version) / name
