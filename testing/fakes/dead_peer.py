"""A connection whose peer is gone without a word, as a load balancer leaves it that forgot the flow. Linux only."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SO_ATTACH_FILTER = 26
PIDFD_GETFD = 438  # the system call, which Python has no name for; the same on every architecture
RETURN_CONSTANT = 0x06  # BPF_RET | BPF_K: so many bytes of each packet are let in


def deafen(heard: socket.socket) -> None:
    """Nothing that is sent to this socket arrives any more, not even an acknowledgement; it cannot be undone.

    A classic BPF program of one instruction (man 7 socket, SO_ATTACH_FILTER).
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", RETURN_CONSTANT, 0, 0, 0))
    heard.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def deafen_connections(pid: int) -> int:
    """Every TCP connection that a process has now; returns how many. Of another process it needs CAP_SYS_PTRACE."""
    count = 0
    for connection in connections_of(pid):
        with connection, suppress(OSError):  # not connected, or no longer
            connection.getpeername()
            deafen(connection)
            count += 1
    return count


def connections_of(pid: int) -> Iterator[socket.socket]:
    """Its internet sockets, as copies to be closed."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed while we looked
            if not os.readlink(link).startswith("socket:"):
                continue
            copied = socket.socket(fileno=_copy(pid, int(link.name)))
            if copied.family in (socket.AF_INET, socket.AF_INET6) and copied.type == socket.SOCK_STREAM:
                yield copied
            else:
                copied.close()


def _copy(pid: int, descriptor: int) -> int:
    if pid == os.getpid():
        return os.dup(descriptor)
    process = os.pidfd_open(pid)
    try:
        copied: int = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if copied < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"descriptor {descriptor} of a process")
    return copied
