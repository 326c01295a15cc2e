"""Install the Debian packages that the test harness needs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.commands import HarnessError, run, stage


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package and a file that exists if the package is installed."""

    name: str
    provided_path: str
    """An absolute path, or the name of a program on PATH."""

    def is_installed(self) -> bool:
        return (
            Path(self.provided_path).exists()
            if self.provided_path.startswith("/")
            else bool(shutil.which(self.provided_path))
        )


RUNTIME = (
    DebianPackage("runc", "runc"),
    DebianPackage("containernetworking-plugins", "/usr/lib/cni/bridge"),
    DebianPackage("iproute2", "ip"),
    DebianPackage("iptables", "iptables"),
    DebianPackage("nftables", "nft"),
    DebianPackage("openssl", "openssl"),
    DebianPackage("util-linux", "nsenter"),
)
IMAGE_BUILDING = (
    DebianPackage("buildah", "buildah"),
    DebianPackage("mmdebstrap", "mmdebstrap"),
    DebianPackage("debian-archive-keyring", "/usr/share/keyrings/debian-archive-keyring.gpg"),
    DebianPackage("ca-certificates", "/etc/ssl/certs/ca-certificates.crt"),
)
BROWSER = (DebianPackage("chromium", "chromium"),)
APT_OPTIONS = ("-o", "DPkg::Lock::Timeout=300")  # another process may hold the dpkg lock


def ensure_packages(packages: tuple[DebianPackage, ...]) -> None:
    missing_packages = tuple(package.name for package in packages if not package.is_installed())
    if not missing_packages:
        return
    if not shutil.which("apt-get"):
        raise HarnessError(f"please install {', '.join(missing_packages)}: apt-get is not available to install them")
    noninteractive = {"DEBIAN_FRONTEND": "noninteractive"}
    with stage(f"install {', '.join(missing_packages)}"):
        run("apt-get", *APT_OPTIONS, "update", "-qq", environment=noninteractive)
        install_command = ("install", "-y", "-qq", "--no-install-recommends")
        run("apt-get", *APT_OPTIONS, *install_command, *missing_packages, environment=noninteractive)
