"""Prepare the cluster's nodes, and remove their containers, processes, mounts and files."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.cgroups import ensure_cgroup, kill_processes_below, list_cgroups_with_prefix, remove_cgroup
from testing.cluster.host.commands import HarnessError, try_run
from testing.cluster.host.layout import ClusterLayout, NodeLayout
from testing.cluster.host.preflight import CAP_SYS_RESOURCE, has_capability
from testing.cluster.host.processes import terminate_processes
from testing.cluster.host.versions import ComponentVersions
from testing.cluster.node.config_files import render_containerd_config
from testing.cluster.node.network import list_network_namespaces

SHIM_SOCKETS = Path("/run/containerd/s")
LOG_LINKS = Path("/var/log/containers")
CNI_RESULTS = Path("/var/lib/cni/results")


def prepare_node(node: NodeLayout) -> None:
    ensure_cgroup(node)
    for folder in (node.root / "kubelet", node.containerd_root):
        folder.mkdir(parents=True, exist_ok=True)
    configuration = render_containerd_config(node, restrict_oom_score=not has_capability(CAP_SYS_RESOURCE))
    (node.root / "containerd.toml").write_text(configuration)


def build_ctr_command(cache: Cache, versions: ComponentVersions, node: NodeLayout) -> tuple[str, ...]:
    program = cache.get_binary_folder("containerd", versions.containerd) / "ctr"
    return (str(program), "--address", str(node.containerd_socket), "--namespace", "k8s.io")


def kill_containers(layout: ClusterLayout) -> None:
    for cgroup in list_cgroups_with_prefix(layout.device_prefix):
        kill_processes_below(cgroup)


def remove_container_records(cache: Cache, versions: ComponentVersions, node: NodeLayout) -> None:
    """Remove the records and file systems of stopped containers, so that only images remain in containerd."""
    command = build_ctr_command(cache, versions, node)
    for kind, removal in (("tasks", ("rm", "--force")), ("containers", ("rm",)), ("sandboxes", ("rm", "--force"))):
        listing = try_run(*command, kind, "list", "-q") if kind != "sandboxes" else try_run(*command, kind, "list")
        lines = listing.stdout.splitlines()
        names = [line.split()[0] for line in (lines[1:] if kind == "sandboxes" else lines) if line.strip()]
        if names:
            try_run(*command, kind, *removal, *names)


def kill_leftover_processes(layout: ClusterLayout) -> None:
    """Kill the containerd shims, which keep running in the node's network namespace after containerd has stopped."""
    for namespace in list_network_namespaces(layout):
        listing = try_run("ip", "netns", "pids", namespace)
        terminate_processes((int(pid) for pid in listing.stdout.split()), grace_seconds=0)


def list_mounts_below(folder: Path) -> tuple[Path, ...]:
    """Return the mount points below a folder, innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mount_points = (Path(line.split()[4].encode().decode("unicode_escape")) for line in lines)
    return tuple(sorted((path for path in mount_points if path.is_relative_to(folder)), reverse=True))


def unmount_below(folder: Path) -> None:
    for mount_point in list_mounts_below(folder):
        try_run("umount", "--lazy", mount_point)
    if remaining := list_mounts_below(folder):
        raise HarnessError(f"cannot unmount {', '.join(str(path) for path in remaining[:3])}")


def remove_files_outside_root(layout: ClusterLayout) -> None:
    """Remove files that containerd, kubelet and the CNI plugins leave at fixed paths outside the cluster's folder."""
    for link in LOG_LINKS.glob("*.log"):
        if link.is_symlink() and Path(link.readlink()).is_relative_to(layout.root):
            link.unlink(missing_ok=True)
    for result in find_cni_results(layout):
        result.unlink(missing_ok=True)


def find_cni_results(layout: ClusterLayout) -> tuple[Path, ...]:
    """Return the result files of the CNI plugins for this cluster's pods.

    A result file contains the path of the pod's network namespace, which is below the cluster's folder.
    """
    matches = []
    for path in CNI_RESULTS.glob("*"):
        with suppress(FileNotFoundError):  # another cluster may delete its file during the iteration
            if f"{layout.root}/" in path.read_text(errors="replace"):
                matches.append(path)
    return tuple(matches)


def find_shim_sockets(layout: ClusterLayout) -> tuple[Path, ...]:
    """Return the sockets of the cluster's shims, read from bootstrap.json while the containers exist.

    The socket names are hashes, so they cannot be derived from the container.
    """
    addresses: list[str] = []
    for bootstrap in layout.root.glob("node*/run/io.containerd.runtime.v2.task/k8s.io/*/bootstrap.json"):
        words = bootstrap.read_text(errors="replace").split('"')
        addresses += [word.removeprefix("unix://") for word in words if word.startswith(f"unix://{SHIM_SOCKETS}/")]
    return tuple(Path(address) for address in addresses)


def remove_node_cgroups(layout: ClusterLayout) -> None:
    for cgroup in list_cgroups_with_prefix(layout.device_prefix):
        remove_cgroup(cgroup)


def remove_files(layout: ClusterLayout, *, keep_images: bool) -> None:
    """Delete the cluster's folder, unless a file system is still mounted below it, so that its content is kept."""
    if list_mounts_below(layout.root):
        raise HarnessError(f"{layout.root} still contains mounts; nothing was deleted")
    if not keep_images:
        shutil.rmtree(layout.root, ignore_errors=True)
        return
    image_folders = {node.containerd_root for node in layout.nodes}
    for child in layout.root.iterdir():
        if child in {node.root for node in layout.nodes}:
            for part in child.iterdir():
                if part not in image_folders:
                    remove_path(part)
        else:
            remove_path(child)


def remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def find_processes_with_path(folder: Path) -> tuple[str, ...]:
    """Return the pid and command line of each process whose arguments contain a path below the folder.

    All daemons and shims of a cluster have such an argument.
    """
    matches = []
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            arguments = command_line.read_bytes().decode(errors="replace").replace("\0", " ")
            if f"{folder}/" in arguments:
                matches.append(f"{command_line.parent.name}: {arguments[:100]}")
    return tuple(matches)
