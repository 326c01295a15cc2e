"""Make the peer of a TCP connection unresponsive without closing it, like a load balancer that dropped the flow.

It works on Linux only.
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
PIDFD_GETFD = 438  # system call number on all architectures; Python does not define it
RETURN_CONSTANT = 0x06  # BPF_RET | BPF_K: return the number of bytes of each packet to accept


def drop_incoming_packets(connection: socket.socket) -> None:
    """Drop all incoming packets of a socket, including acknowledgements, with a BPF program of one instruction.

    This cannot be undone. Source: man 7 socket, SO_ATTACH_FILTER.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", RETURN_CONSTANT, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def drop_incoming_packets_of_process(pid: int) -> int:
    """Drop incoming packets of all current TCP connections of a process and return the number of connections.

    Dropping packets of another process requires CAP_SYS_PTRACE.
    """
    count = 0
    for connection in copy_connections(pid):
        with connection, suppress(OSError):  # the socket is not connected
            connection.getpeername()
            drop_incoming_packets(connection)
            count += 1
    return count


def copy_connections(pid: int) -> Iterator[socket.socket]:
    """Yield duplicates of the TCP sockets of a process, which the caller must close."""
    for descriptor_path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # the descriptor has been closed
            if not os.readlink(descriptor_path).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=_duplicate_descriptor(pid, int(descriptor_path.name)))
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield duplicate
            else:
                duplicate.close()


def _duplicate_descriptor(pid: int, descriptor: int) -> int:
    if pid == os.getpid():
        return os.dup(descriptor)
    pidfd = os.pidfd_open(pid)
    try:
        duplicate: int = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, descriptor, 0)
    finally:
        os.close(pidfd)
    if duplicate < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"descriptor {descriptor} of {pid}")
    return duplicate
