"""Marker for tests that connect over IPv6."""

import socket

import pytest


def has_ipv6_loopback() -> bool:
    """Return whether this host can listen on ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


requires_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="this host has no IPv6")
LOOPBACK_ADDRESSES = (
    pytest.param("127.0.0.1", id="IPv4"),
    pytest.param("::1", id="IPv6", marks=requires_ipv6),
)
