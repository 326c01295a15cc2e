"""Finds the ranks among the processes of a user command, and their connections to the process group's store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_FORKED_RANK = re.compile(r"rank-(\d+)")  # process name of the ranks that the launcher has forked
_ESTABLISHED = "01"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class RankProcess:
    """A process of a rank; data loaders of a rank count as its processes."""

    pid: int
    rank: int
    master_port: int


def find_rank_processes(root_pid: int, *, master_port: int, proc: Path = PROC) -> tuple[RankProcess, ...]:
    """Return the rank processes among the descendants of a process.

    A rank has a process name of the launcher, or the variables RANK and WORLD_SIZE as torchrun sets them. Programs with
    a world size of 1, and processes whose environment is unreadable, are no ranks.
    master_port: port of the ranks that the launcher has forked, whose environment is that of the launcher.
    """
    processes = []
    for pid in _list_descendants(root_pid, proc):
        with suppress(OSError, ValueError):  # the process has ended, or its variables are not numbers
            forked = _FORKED_RANK.fullmatch((proc / str(pid) / "comm").read_text().strip())
            if forked:
                processes.append(RankProcess(pid, int(forked[1]), master_port))
                continue
            env = _read_environment(proc / str(pid) / "environ")
            if "RANK" in env and int(env.get("WORLD_SIZE", "1")) > 1:
                processes.append(RankProcess(pid, int(env["RANK"]), int(env.get("MASTER_PORT", master_port))))
    return tuple(processes)


def find_connected_ranks(processes: tuple[RankProcess, ...], *, proc: Path = PROC) -> frozenset[int]:
    """Return the ranks that have an established TCP connection to or from the port of their store."""
    sockets_by_port = _list_established_sockets(proc)
    return frozenset(
        process.rank
        for process in processes
        if not sockets_by_port.get(process.master_port, frozenset()).isdisjoint(_list_sockets(process.pid, proc))
    )


def _list_descendants(root_pid: int, proc: Path) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    remaining = [root_pid]
    while remaining:
        pid = remaining.pop()
        yield pid
        remaining += children.pop(pid, ())


def _read_environment(file: Path) -> Mapping[str, str]:
    entries = file.read_bytes().decode(errors="replace").split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if "=" in entry)


def _list_established_sockets(proc: Path) -> dict[int, frozenset[str]]:
    """Return the inodes of the established TCP sockets of this network namespace by local and by remote port."""
    inodes: dict[int, set[str]] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # a kernel without IPv6 has no tcp6
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                _, local, remote, state, *_, inode = line.split()[:10]
                if state == _ESTABLISHED:
                    for address in (local, remote):
                        inodes.setdefault(int(address.rpartition(":")[2], 16), set()).add(inode)
    return {port: frozenset(found) for port, found in inodes.items()}


def _list_sockets(pid: int, proc: Path) -> frozenset[str]:
    inodes = set()
    with suppress(OSError):
        for descriptor in (proc / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if match := _SOCKET.fullmatch(str(descriptor.readlink())):
                    inodes.add(match[1])
    return frozenset(inodes)
