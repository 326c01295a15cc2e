"""Debian packages that the harness needs; it installs those that are missing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.commands import ClusterError, run, stage


@dataclass(frozen=True)
class Package:
    name: str
    provides: str
    """A program on PATH, or an absolute path."""

    def is_installed(self) -> bool:
        return Path(self.provides).exists() if self.provides.startswith("/") else bool(shutil.which(self.provides))


RUNTIME = (
    Package("runc", "runc"),
    Package("containernetworking-plugins", "/usr/lib/cni/bridge"),
    Package("iproute2", "ip"),
    Package("iptables", "iptables"),
    Package("nftables", "nft"),
    Package("openssl", "openssl"),
    Package("util-linux", "nsenter"),
)
IMAGE_BUILDING = (
    Package("buildah", "buildah"),
    Package("mmdebstrap", "mmdebstrap"),
    Package("debian-archive-keyring", "/usr/share/keyrings/debian-archive-keyring.gpg"),
    Package("ca-certificates", "/etc/ssl/certs/ca-certificates.crt"),
)
BROWSER = (Package("chromium", "chromium"),)


PATIENT = ("-o", "DPkg::Lock::Timeout=300")  # somebody else may be installing something


def ensure_packages(packages: tuple[Package, ...]) -> None:
    missing = tuple(package.name for package in packages if not package.is_installed())
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise ClusterError(f"please install {', '.join(missing)}: there is no apt-get here to do it with")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with stage(f"install {', '.join(missing)}"):
        run("apt-get", *PATIENT, "update", "-qq", environment=quiet)
        run("apt-get", *PATIENT, "install", "-y", "-qq", "--no-install-recommends", *missing, environment=quiet)
