"""DNS lookup of node rank 0, with retries until its pod has started."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable

FIRST_LOOKUP_DELAY_SECONDS = 1.0  # DNS caches may keep a negative response for 30 s
MAX_INTERVAL_SECONDS = 10.0
TIMEOUT_SECONDS = 1800.0  # the operator usually stops waiting nodes earlier, see spec.startupDeadlineSeconds
OPTIONAL_TIMEOUT_SECONDS = 30.0


class DnsTimeout(Exception):
    """The host name of node rank 0 did not resolve in time."""


def wait_for_master(
    host: str, *, node_rank: int, pause: Callable[[float], None], is_name_required: bool = True
) -> None:
    """Wait until `host`, the address of node rank 0, resolves.

    Node rank 0 finds its own name in its hosts file, except on the network of its Kubernetes node.
    If `is_name_required` is False, the timeout is only 30 s, because the pod of node rank 0 may have terminated
    already, which removes its DNS record. Raises DnsTimeout if a required name does not resolve.
    """
    if _is_resolved_without_dns(host):
        return
    started_at, timeout_seconds = time.monotonic(), TIMEOUT_SECONDS if is_name_required else OPTIONAL_TIMEOUT_SECONDS
    interval = 0.0 if node_rank == 0 else FIRST_LOOKUP_DELAY_SECONDS
    while True:
        pause(interval)
        error = _find_lookup_error(host)
        if error is None:
            return
        waited_seconds = time.monotonic() - started_at
        if waited_seconds >= timeout_seconds and not is_name_required:
            return
        if waited_seconds >= timeout_seconds:
            raise DnsTimeout(
                f"{host}, the address of node rank 0, did not resolve within {timeout_seconds:.0f}s ({error});"
                " check that its pod was created and that the cluster's DNS answers"
            )
        interval = min(max(interval * 1.5, 0.5), MAX_INTERVAL_SECONDS, timeout_seconds - waited_seconds)


def _find_lookup_error(host: str) -> str | None:
    """Return the resolver's error message, or None if the name resolves."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return str(error)
    return None


def _is_resolved_without_dns(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
