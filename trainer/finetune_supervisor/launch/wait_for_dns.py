"""Waiting until the name of node rank 0 resolves."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable

FIRST_ASKED_AFTER_SECONDS = 1.0  # a name asked before it exists may stay unknown for 30 s in a cache
LONGEST_INTERVAL_SECONDS = 10.0
DEADLINE_SECONDS = 1800.0  # the operator releases nodes that wait for others earlier (spec.startupDeadlineSeconds)
PATIENCE_SECONDS = 30.0  # where one can do without


class DnsTimeout(Exception):
    """The name of node rank 0 did not resolve in time."""


def wait_for_master(host: str, *, node_rank: int, pause: Callable[[float], None], needed: bool = True) -> None:
    """Return once `host` resolves. Node rank 0 asks for itself and finds the answer in its own hosts file.

    A name that is not needed is waited for a while: a pod that has ended has none any more.
    """
    if _needs_no_dns(host):
        return
    start, deadline_seconds = time.monotonic(), DEADLINE_SECONDS if needed else PATIENCE_SECONDS
    interval = 0.0 if node_rank == 0 else FIRST_ASKED_AFTER_SECONDS
    while True:
        pause(interval)
        problem = _ask(host)
        if problem is None:
            return
        waited = time.monotonic() - start
        if waited >= deadline_seconds and not needed:
            return
        if waited >= deadline_seconds:
            raise DnsTimeout(
                f"{host}, the address of node rank 0, did not resolve within {deadline_seconds:.0f}s ({problem});"
                " check that its pod was created and that the cluster's DNS answers"
            )
        interval = min(max(interval * 1.5, 0.5), LONGEST_INTERVAL_SECONDS, deadline_seconds - waited)


def _ask(host: str) -> str | None:
    """None if the name resolves, else what the resolver said."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return str(error)
    return None


def _needs_no_dns(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
