"""Each node's own part of the cgroup tree, for version 1 (one tree per controller) and 2 (one for all)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from testing.cluster.host.commands import ClusterError
from testing.cluster.host.layout import NodeLayout
from testing.cluster.host.processes import end_processes

ROOT = Path("/sys/fs/cgroup")
CPU_PERIOD_MICROSECONDS = 100_000
NEEDED = ("cpu", "cpuset", "memory", "pids")


def is_unified(root: Path = ROOT) -> bool:
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = ROOT) -> tuple[Path, ...]:
    """Where trees start: the one of version 2, or each of version 1 without links such as cpu,cpuacct."""
    if is_unified(root):
        return (root,)
    return tuple(sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()))


def missing_controllers(root: Path = ROOT) -> tuple[str, ...]:
    if is_unified(root):
        present = (root / "cgroup.controllers").read_text().split()
    else:
        present = [path.name for path in root.iterdir()] if root.is_dir() else []
    return tuple(name for name in NEEDED if name not in present)


def ensure_cgroup(node: NodeLayout) -> None:
    if is_unified():
        delegate_controllers(ROOT)
    for hierarchy in hierarchies():
        folder = hierarchy / node.cgroup
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # a new cpuset of version 1 is empty and takes no process
            if not is_unified() and (folder / setting).exists():
                (folder / setting).write_text((hierarchy / setting).read_text())
    if is_unified():
        delegate_controllers(ROOT / node.cgroup)


def delegate_controllers(folder: Path) -> None:
    available = (folder / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{name}" for name in available)
    try:
        (folder / "cgroup.subtree_control").write_text(wanted)
    except OSError as refused:
        raise ClusterError(
            f"{folder}/cgroup.subtree_control: {refused.strerror}; inside a container, move its processes into a "
            "child cgroup first (a cgroup with processes cannot hand controllers down)"
        ) from refused


def cgroup_folders(cgroup: str) -> Iterator[Path]:
    """The node's cgroups in every hierarchy, children before parents; some may vanish while we look."""
    for hierarchy in hierarchies():
        for folder, _, _ in os.walk(hierarchy / cgroup, topdown=False):
            yield Path(folder)


def processes_below(cgroup: str) -> frozenset[int]:
    return frozenset(pid for folder in cgroup_folders(cgroup) for pid in processes_of(folder))


def processes_of(folder: Path) -> tuple[int, ...]:
    """Nothing when the cgroup goes away meanwhile."""
    with suppress(OSError):
        return tuple(int(line) for line in (folder / "cgroup.procs").read_text().split())
    return ()


def end_processes_below(cgroup: str) -> None:
    """Asked again until none is left, since a process may start another while we look."""
    deadline = time.monotonic() + 20
    while pids := processes_below(cgroup):
        end_processes(pids, patience_seconds=0)
        if time.monotonic() > deadline:
            raise ClusterError(f"cgroup {cgroup} still has processes {sorted(pids)}")


def remove_cgroup(cgroup: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        for folder in cgroup_folders(cgroup):
            with suppress(OSError):  # busy for a moment after its last process ended
                folder.rmdir()
        left = tuple(cgroup_folders(cgroup))
        if not left:
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"cgroups cannot be removed: {', '.join(str(path) for path in left[:3])}")
        time.sleep(0.05)


def set_cpu_limit(cgroup: str, *, cores: float | None, root: Path = ROOT) -> None:
    """Share of every 100 ms that the group may run; None is no limit."""
    quota = None if cores is None else int(cores * CPU_PERIOD_MICROSECONDS)
    if is_unified(root):
        (root / cgroup / "cpu.max").write_text(f"{'max' if quota is None else quota} {CPU_PERIOD_MICROSECONDS}")
    else:
        (root / "cpu" / cgroup / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))


def cgroups_with_prefix(prefix: str) -> tuple[str, ...]:
    return tuple(sorted({path.name for top in hierarchies() for path in top.glob(f"{prefix}-n*") if path.is_dir()}))
