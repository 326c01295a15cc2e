"""Starting one node's programs, and taking everything away that it and its containers leave."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.cgroups import cgroups_with_prefix, end_processes_below, ensure_cgroup, remove_cgroup
from testing.cluster.host.commands import ClusterError, attempt
from testing.cluster.host.layout import Layout, NodeLayout
from testing.cluster.host.preflight import CAP_SYS_RESOURCE, has_capability
from testing.cluster.host.processes import end_processes
from testing.cluster.host.versions import Versions
from testing.cluster.node.config_files import render_containerd
from testing.cluster.node.network import network_namespaces

SHIM_SOCKETS = Path("/run/containerd/s")
LOG_LINKS = Path("/var/log/containers")
CNI_RESULTS = Path("/var/lib/cni/results")


def prepare_node(node: NodeLayout) -> None:
    ensure_cgroup(node)
    for folder in (node.root / "kubelet", node.containerd_root):
        folder.mkdir(parents=True, exist_ok=True)
    configuration = render_containerd(node, restrict_oom_score=not has_capability(CAP_SYS_RESOURCE))
    (node.root / "containerd.toml").write_text(configuration)


def ctr(cache: Cache, versions: Versions, node: NodeLayout) -> tuple[str, ...]:
    program = cache.binaries("containerd", versions.containerd) / "ctr"
    return (str(program), "--address", str(node.containerd_socket), "--namespace", "k8s.io")


def end_containers(layout: Layout) -> None:
    for cgroup in cgroups_with_prefix(layout.device_prefix):
        end_processes_below(cgroup)


def forget_containers(cache: Cache, versions: Versions, node: NodeLayout) -> None:
    """Remove the records and file systems of ended containers, so that the images can outlive the cluster."""
    command = ctr(cache, versions, node)
    for kind, removal in (("tasks", ("rm", "--force")), ("containers", ("rm",)), ("sandboxes", ("rm", "--force"))):
        listed = attempt(*command, kind, "list", "-q") if kind != "sandboxes" else attempt(*command, kind, "list")
        lines = listed.stdout.splitlines()
        names = [line.split()[0] for line in (lines[1:] if kind == "sandboxes" else lines) if line.strip()]
        if names:
            attempt(*command, kind, *removal, *names)


def end_leftover_processes(layout: Layout) -> None:
    """Shims run on in the node's network namespace when containerd has ended."""
    for namespace in network_namespaces(layout):
        listed = attempt("ip", "netns", "pids", namespace)
        end_processes((int(pid) for pid in listed.stdout.split()), patience_seconds=0)


def mounts_below(folder: Path) -> tuple[Path, ...]:
    """Innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = (Path(line.split()[4].encode().decode("unicode_escape")) for line in lines)
    return tuple(sorted((place for place in places if place.is_relative_to(folder)), reverse=True))


def unmount_below(folder: Path) -> None:
    for place in mounts_below(folder):
        attempt("umount", "--lazy", place)
    if left := mounts_below(folder):
        raise ClusterError(f"cannot unmount {', '.join(str(place) for place in left[:3])}")


def remove_traces(layout: Layout) -> None:
    """What containerd, kubelet and the network plugins leave in fixed places outside our folder."""
    for link in LOG_LINKS.glob("*.log"):
        if link.is_symlink() and Path(link.readlink()).is_relative_to(layout.root):
            link.unlink(missing_ok=True)
    for result in network_results(layout):
        result.unlink(missing_ok=True)


def network_results(layout: Layout) -> tuple[Path, ...]:
    """What network plugins noted about pods of ours: the path of each pod's network namespace is in it."""
    found = []
    for path in CNI_RESULTS.glob("*"):
        with suppress(FileNotFoundError):  # another cluster's pod ended meanwhile
            if f"{layout.root}/" in path.read_text(errors="replace"):
                found.append(path)
    return tuple(found)


def shim_sockets(layout: Layout) -> tuple[Path, ...]:
    """Their names are hashes; while a container exists, its folder says which one is its own."""
    found = []
    for bootstrap in layout.root.glob("node*/run/io.containerd.runtime.v2.task/k8s.io/*/bootstrap.json"):
        words = bootstrap.read_text(errors="replace").split('"')
        found += [word.removeprefix("unix://") for word in words if word.startswith(f"unix://{SHIM_SOCKETS}/")]
    return tuple(Path(address) for address in found)


def remove_node_cgroups(layout: Layout) -> None:
    for cgroup in cgroups_with_prefix(layout.device_prefix):
        remove_cgroup(cgroup)


def remove_files(layout: Layout, *, keep_images: bool) -> None:
    """Never while something is mounted below: it would delete what is mounted."""
    if mounts_below(layout.root):
        raise ClusterError(f"{layout.root} still holds mounts; nothing was deleted")
    if not keep_images:
        shutil.rmtree(layout.root, ignore_errors=True)
        return
    kept = {node.containerd_root for node in layout.nodes}
    for child in layout.root.iterdir():
        if child in {node.root for node in layout.nodes}:
            for part in child.iterdir():
                if part not in kept:
                    remove(part)
        else:
            remove(child)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def processes_naming(folder: Path) -> tuple[str, ...]:
    """Command lines of processes that were started with a path below the folder (daemons and shims all are)."""
    found = []
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = command_line.read_bytes().decode(errors="replace").replace("\0", " ")
            if f"{folder}/" in words:
                found.append(f"{command_line.parent.name}: {words[:100]}")
    return tuple(found)
