"""Manage the cgroup of each node, with cgroup v1 (one hierarchy per controller) or v2 (one unified hierarchy)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from testing.cluster.host.commands import HarnessError
from testing.cluster.host.layout import NodeLayout
from testing.cluster.host.processes import terminate_processes

ROOT = Path("/sys/fs/cgroup")
CPU_PERIOD_MICROSECONDS = 100_000
REQUIRED_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")


def is_cgroup_v2(root: Path = ROOT) -> bool:
    return (root / "cgroup.controllers").exists()


def list_hierarchies(root: Path = ROOT) -> tuple[Path, ...]:
    """Return the hierarchy roots: one for v2, one per controller for v1, excluding symlinks such as cpuacct."""
    if is_cgroup_v2(root):
        return (root,)
    return tuple(sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()))


def find_missing_controllers(root: Path = ROOT) -> tuple[str, ...]:
    if is_cgroup_v2(root):
        available_controllers = (root / "cgroup.controllers").read_text().split()
    else:
        available_controllers = [path.name for path in root.iterdir()] if root.is_dir() else []
    return tuple(name for name in REQUIRED_CONTROLLERS if name not in available_controllers)


def ensure_cgroup(node: NodeLayout) -> None:
    if is_cgroup_v2():
        delegate_controllers(ROOT)
    for hierarchy in list_hierarchies():
        folder = hierarchy / node.cgroup
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # a new v1 cpuset is empty and accepts no process
            if not is_cgroup_v2() and (folder / setting).exists():
                (folder / setting).write_text((hierarchy / setting).read_text())
    if is_cgroup_v2():
        delegate_controllers(ROOT / node.cgroup)


def delegate_controllers(folder: Path) -> None:
    available_controllers = (folder / "cgroup.controllers").read_text().split()
    enable_all = " ".join(f"+{name}" for name in available_controllers)
    try:
        (folder / "cgroup.subtree_control").write_text(enable_all)
    except OSError as error:
        raise HarnessError(
            f"{folder}/cgroup.subtree_control: {error.strerror}; inside a container, move its processes into a "
            "child cgroup first (a cgroup with processes cannot delegate controllers)"
        ) from error


def walk_cgroup_folders(cgroup: str) -> Iterator[Path]:
    """Yield the node's cgroups in every hierarchy, children first; a cgroup may disappear during the iteration."""
    for hierarchy in list_hierarchies():
        for folder, _, _ in os.walk(hierarchy / cgroup, topdown=False):
            yield Path(folder)


def list_pids_below(cgroup: str) -> frozenset[int]:
    return frozenset(pid for folder in walk_cgroup_folders(cgroup) for pid in read_pids(folder))


def read_pids(folder: Path) -> tuple[int, ...]:
    """Return the pids in a cgroup, or no pids if the cgroup has been removed."""
    with suppress(OSError):
        return tuple(int(line) for line in (folder / "cgroup.procs").read_text().split())
    return ()


def kill_processes_below(cgroup: str) -> None:
    """Kill the processes of a cgroup repeatedly until none is left, because a process may fork before it is killed."""
    deadline = time.monotonic() + 20
    while pids := list_pids_below(cgroup):
        terminate_processes(pids, grace_seconds=0)
        if time.monotonic() > deadline:
            raise HarnessError(f"cgroup {cgroup} still has processes {sorted(pids)}")


def remove_cgroup(cgroup: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        for folder in walk_cgroup_folders(cgroup):
            with suppress(OSError):  # rmdir fails with EBUSY for a moment after the last process ended
                folder.rmdir()
        remaining_folders = tuple(walk_cgroup_folders(cgroup))
        if not remaining_folders:
            return
        if time.monotonic() > deadline:
            raise HarnessError(f"cgroups cannot be removed: {', '.join(str(path) for path in remaining_folders[:3])}")
        time.sleep(0.05)


def set_cpu_limit(cgroup: str, *, cores: float | None, root: Path = ROOT) -> None:
    """Limit a cgroup to `cores` CPUs, as a quota per 100 ms period; None removes the limit."""
    quota = None if cores is None else int(cores * CPU_PERIOD_MICROSECONDS)
    if is_cgroup_v2(root):
        (root / cgroup / "cpu.max").write_text(f"{'max' if quota is None else quota} {CPU_PERIOD_MICROSECONDS}")
    else:
        (root / "cpu" / cgroup / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


def list_cgroups_with_prefix(prefix: str) -> tuple[str, ...]:
    return tuple(
        sorted(
            {path.name for hierarchy in list_hierarchies() for path in hierarchy.glob(f"{prefix}-n*") if path.is_dir()}
        )
    )
