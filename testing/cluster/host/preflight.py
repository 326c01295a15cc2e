"""Preflight checks that this host can run the throwaway cluster."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.cgroups import find_missing_controllers
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.layout import (
    API_SERVER_PORT,
    DNS_READY_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    ClusterLayout,
    check_root,
)

CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
MINIMUM_FREE_GIB = 5


def find_host_problem() -> str | None:
    """Return the reason why this host cannot run the cluster, or None; the host is not changed."""
    if platform.system() != "Linux":
        return f"the throwaway cluster needs Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return "the throwaway cluster must be started by root: it creates network namespaces, mounts and cgroups"
    if not all(has_capability(number) for number in (CAP_NET_ADMIN, CAP_SYS_ADMIN)):
        return "root has no CAP_SYS_ADMIN or CAP_NET_ADMIN here (a container without --privileged?)"
    if missing := find_missing_controllers():
        return f"/sys/fs/cgroup has no {', '.join(missing)} controller"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system (modprobe overlay)"
    return None


def require_supported_host(cache: Cache, cluster_root: Path) -> None:
    reason = find_host_problem()
    if reason is not None:
        raise HarnessError(reason)
    try:
        check_root(cluster_root)
    except ValueError as error:
        raise HarnessError(str(error)) from error
    cache.root.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(cache.root).free / 2**30
    if free_gib < MINIMUM_FREE_GIB:
        raise HarnessError(f"{cache.root} has {free_gib:.1f} GiB free; the cluster needs {MINIMUM_FREE_GIB}")
    file_system = get_file_system_type(cache.root)
    if file_system in ("overlay", "tmpfs", "nfs", "nfs4", "9p"):
        raise HarnessError(f"{cache.root} is on {file_system}, which cannot hold container layers; set FINETUNE_CACHE")


def has_capability(number: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    capabilities = next(line for line in lines if line.startswith("CapEff:")).split()[1]
    return bool(int(capabilities, 16) >> number & 1)


def get_file_system_type(path: Path) -> str:
    """Return the file system type of the innermost mount that contains the path."""
    mounts = (line.split(" - ", 1) for line in Path("/proc/self/mountinfo").read_text().splitlines())
    types = {Path(mount.split()[4]): source.split()[0] for mount, source in mounts}
    return next(types[folder] for folder in (path, *path.parents) if folder in types)


def require_free_ports(layout: ClusterLayout) -> None:
    """Check that no program listens on the cluster's ports; the bridge must exist.

    Only a program that listens on all addresses can conflict.

    Raises:
        HarnessError: a port is in use.
    """
    for port in (API_SERVER_PORT, ETCD_PORT, ETCD_PEER_PORT, DNS_READY_PORT, 53):
        family = socket.AF_INET6 if layout.host_address.version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((str(layout.host_address), port))
            except OSError as error:
                raise HarnessError(
                    f"port {port} on {layout.host_address}: {error.strerror} (see `ss -ltnp sport = :{port}`)"
                ) from error
