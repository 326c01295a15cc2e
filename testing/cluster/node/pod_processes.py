"""Find the processes of a pod on the host, by the cgroup that the kubelet created for it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.host.cgroups import read_pids, walk_cgroup_folders
from testing.cluster.host.commands import HarnessError


@dataclass(frozen=True)
class PodProcess:
    """A process of a pod; `pid` is its pid on the host, `namespace_pid` its pid in the container."""

    pid: int
    container_id: str
    namespace_pid: int
    name: str
    environment: dict[str, str]

    @property
    def rank(self) -> int | None:
        """Global rank, from the process name that the launcher sets or from torchrun's variables."""
        if self.name.startswith("rank-"):
            return int(self.name.removeprefix("rank-"))
        return int(self.environment["RANK"]) if {"RANK", "LOCAL_RANK"} <= self.environment.keys() else None


def find_processes_of_pod(node_cgroup: str, pod_uid: str) -> tuple[PodProcess, ...]:
    """Return all processes in `.../pod<uid>/<container id>`, including the pause container."""
    processes: dict[int, PodProcess] = {}
    for folder in walk_cgroup_folders(node_cgroup):
        if folder.parent.name == f"pod{pod_uid}":
            for pid in read_pids(folder):
                if pid not in processes and (process := read_process(pid, container_id=folder.name)):
                    processes[pid] = process
    return tuple(processes.values())


def read_process(pid: int, *, container_id: str) -> PodProcess | None:
    """Read a process from /proc; return None if it has ended."""
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


def find_running_container_id(pod: dict[str, Any], container: str | None) -> str:
    """Return the id of the named container, or of the pod's only running container.

    Raises:
        HarnessError: no container or more than one matches; the message lists the running containers.
    """
    statuses = pod.get("status", {}).get("containerStatuses", [])
    ids_by_name = {status["name"]: status["containerID"] for status in statuses if "running" in status["state"]}
    matches = [name for name in ids_by_name if container in (None, name)]
    if len(matches) != 1:
        running_names = ", ".join(ids_by_name) or "none"
        name = pod["metadata"]["name"]
        requested_name = container or "(the only one)"
        raise HarnessError(f"pod {name}: requested container {requested_name}; running containers: {running_names}")
    return str(ids_by_name[matches[0]]).rpartition("/")[2]
