"""Build the Debian and Python base image from packages, for hosts without access to a registry."""

from __future__ import annotations

from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import run, stage

SUITE = "bookworm"
PACKAGES = ("usr-is-merged", "python3-venv", "ca-certificates", "libstdc++6")
APT_PACKAGES = ("apt", "debian-archive-keyring")
EXCLUDED_PATHS = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/lib/x86_64-linux-gnu/gconv/*",
)
MERGED_USR_HOOK = "/usr/share/mmdebstrap/hooks/merged-usr"


def ensure_root_file_system(cache: Cache, *, with_apt: bool = False) -> Path:
    """Return a 100 MB root file system archive with essential packages and Python; build it if it is missing.

    with_apt: include apt, for images whose Dockerfile installs Debian packages
    """
    archive = cache.images / f"base-{SUITE}{'-apt' if with_apt else ''}.tar"
    packages = (*PACKAGES, *APT_PACKAGES) if with_apt else PACKAGES
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished_archive = archive.with_suffix(".unfinished.tar")
        with stage(f"base image of Debian {SUITE}"):
            run(
                *("mmdebstrap", "--quiet", "--variant=essential", f"--hook-dir={MERGED_USR_HOOK}"),
                *(f"--include={','.join(packages)}", '--aptopt=APT::Install-Recommends "false"'),
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED_PATHS),
                *(SUITE, unfinished_archive),
            )
        unfinished_archive.rename(archive)
    return archive
