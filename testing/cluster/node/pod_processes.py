"""The processes of a pod, found from the host by the cgroup that its kubelet made for it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.host.cgroups import cgroup_folders, processes_of
from testing.cluster.host.commands import ClusterError


@dataclass(frozen=True)
class PodProcess:
    pid: int
    container_id: str
    namespace_pid: int
    name: str
    environment: dict[str, str]

    @property
    def rank(self) -> int | None:
        """Over the whole job: by the name that a fork of our launcher has, or by torchrun's variables."""
        if self.name.startswith("rank-"):
            return int(self.name.removeprefix("rank-"))
        return int(self.environment["RANK"]) if {"RANK", "LOCAL_RANK"} <= self.environment.keys() else None


def processes_of_pod(node_cgroup: str, pod_uid: str) -> tuple[PodProcess, ...]:
    """Every process below `.../pod<uid>/<container id>`, the one that holds the namespaces open included."""
    found: dict[int, PodProcess] = {}
    for folder in cgroup_folders(node_cgroup):
        if folder.parent.name == f"pod{pod_uid}":
            for pid in processes_of(folder):
                if pid not in found and (process := read_process(pid, container_id=folder.name)):
                    found[pid] = process
    return tuple(found.values())


def read_process(pid: int, *, container_id: str) -> PodProcess | None:
    """None when it ended while we looked."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        pairs = (entry.partition("=") for entry in environment.split("\0") if entry)
        return PodProcess(
            pid=pid,
            container_id=container_id,
            namespace_pid=int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]),
            name=Path(f"/proc/{pid}/comm").read_text().strip(),
            environment={key: value for key, _, value in pairs},
        )
    return None


def container_id_of(pod: dict[str, Any], container: str | None) -> str:
    """Of the named container, or of the pod's only one; a ClusterError says which there are."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    running = {status["name"]: status["containerID"] for status in statuses if "running" in status["state"]}
    wanted = [name for name in running if container in (None, name)]
    if len(wanted) != 1:
        shown = ", ".join(running) or "none"
        name = pod["metadata"]["name"]
        raise ClusterError(f"pod {name}: asked for container {container or '(the only one)'}, running are: {shown}")
    return str(running[wanted[0]]).rpartition("/")[2]
