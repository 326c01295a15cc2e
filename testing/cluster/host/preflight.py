"""Whether this machine can run the throwaway cluster at all, and if not, why, in one line."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.cgroups import missing_controllers
from testing.cluster.host.commands import ClusterError
from testing.cluster.host.layout import API_SERVER_PORT, DNS_READY_PORT, ETCD_PEER_PORT, ETCD_PORT, Layout, check_root

CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
MINIMUM_FREE_GIB = 5


def reason_it_cannot_run() -> str | None:
    """None on a machine where it is worth trying; nothing is changed to find out."""
    if platform.system() != "Linux":
        return f"the throwaway cluster needs Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return "the throwaway cluster must be started by root: it makes network namespaces, mounts and cgroups"
    if not all(has_capability(number) for number in (CAP_NET_ADMIN, CAP_SYS_ADMIN)):
        return "root has no CAP_SYS_ADMIN or CAP_NET_ADMIN here (a container without --privileged?)"
    if lacking := missing_controllers():
        return f"/sys/fs/cgroup offers no {', '.join(lacking)} controller"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system (modprobe overlay)"
    return None


def require_able_machine(cache: Cache, cluster_root: Path) -> None:
    reason = reason_it_cannot_run()
    if reason is not None:
        raise ClusterError(reason)
    try:
        check_root(cluster_root)
    except ValueError as unusable:
        raise ClusterError(str(unusable)) from unusable
    cache.root.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(cache.root).free / 2**30
    if free_gib < MINIMUM_FREE_GIB:
        raise ClusterError(f"{cache.root} has {free_gib:.1f} GiB free; the cluster needs {MINIMUM_FREE_GIB}")
    kind = file_system_of(cache.root)
    if kind in ("overlay", "tmpfs", "nfs", "nfs4", "9p"):
        raise ClusterError(f"{cache.root} is on {kind}, which cannot hold container layers; set FINETUNE_CACHE")


def has_capability(number: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(line for line in lines if line.startswith("CapEff:")).split()[1]
    return bool(int(effective, 16) >> number & 1)


def file_system_of(path: Path) -> str:
    """The type of the innermost mount that holds the path."""
    mounts = (line.split(" - ", 1) for line in Path("/proc/self/mountinfo").read_text().splitlines())
    kinds = {Path(place.split()[4]): rest.split()[0] for place, rest in mounts}
    return next(kinds[folder] for folder in (path, *path.parents) if folder in kinds)


def require_free_ports(layout: Layout) -> None:
    """Asked when the bridge exists: only a program that listens on every address is in the way."""
    for port in (API_SERVER_PORT, ETCD_PORT, ETCD_PEER_PORT, DNS_READY_PORT, 53):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((str(layout.host_address), port))
            except OSError as taken:
                raise ClusterError(
                    f"port {port} on {layout.host_address}: {taken.strerror} (see `ss -ltnp sport = :{port}`)"
                ) from taken
