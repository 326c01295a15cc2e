"""Make the peer of a TCP connection unresponsive without closing it, like a load balancer that dropped the flow.

Linux only.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SO_ATTACH_FILTER = 26
PIDFD_GETFD = 438  # system call number, not available in Python; the same on every architecture
RETURN_CONSTANT = 0x06  # BPF_RET | BPF_K: accept this many bytes of each packet


def drop_incoming_packets(connection: socket.socket) -> None:
    """Drop all incoming packets of a socket, including acknowledgements, with a BPF program of one instruction.

    Cannot be undone. Source: man 7 socket, SO_ATTACH_FILTER.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", RETURN_CONSTANT, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def drop_incoming_packets_of(pid: int) -> int:
    """Drop incoming packets of all current TCP connections of a process, and return their number.

    For another process this needs CAP_SYS_PTRACE.
    """
    count = 0
    for connection in copy_connections(pid):
        with connection, suppress(OSError):  # not connected
            connection.getpeername()
            drop_incoming_packets(connection)
            count += 1
    return count


def copy_connections(pid: int) -> Iterator[socket.socket]:
    """Yield duplicates of the TCP sockets of a process, to be closed by the caller."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if not os.readlink(link).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=_duplicate_descriptor(pid, int(link.name)))
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield duplicate
            else:
                duplicate.close()


def _duplicate_descriptor(pid: int, descriptor: int) -> int:
    if pid == os.getpid():
        return os.dup(descriptor)
    process = os.pidfd_open(pid)
    try:
        duplicate: int = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if duplicate < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"descriptor {descriptor} of {pid}")
    return duplicate
