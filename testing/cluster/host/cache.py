"""Cache folder outside the repository for Go caches, binaries, images and files of running clusters."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cache:
    """Paths and locks below the cache folder (FINETUNE_CACHE)."""

    root: Path

    @classmethod
    def from_environment(cls) -> Cache:
        configured_root = os.environ.get("FINETUNE_CACHE")
        root = Path(configured_root) if configured_root else Path.home() / ".cache" / "finetune-operator"
        return cls(root.expanduser().resolve())

    def get_binary_folder(self, component: str, version: str) -> Path:
        return self.root / "bin" / f"{component}-{version}"

    @property
    def images(self) -> Path:
        return self.root / "images"

    def get_cluster_folder(self, name: str) -> Path:
        return self.root / "cluster" / name

    @property
    def go_environment(self) -> dict[str, str]:
        """Environment variables for Go; `-modcacherw` lets the owner of the module cache delete it."""
        return {
            "GOMODCACHE": str(self.root / "go" / "mod"),
            "GOCACHE": str(self.root / "go" / "build"),
            "GOFLAGS": "-modcacherw -buildvcs=false",
            "GOTOOLCHAIN": "local",
            "CGO_ENABLED": "0",
        }

    @contextmanager
    def hold_lock(self, purpose: str) -> Iterator[None]:
        """Hold an exclusive file lock, so that concurrent builds or `up` commands run one after the other."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{purpose}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)
