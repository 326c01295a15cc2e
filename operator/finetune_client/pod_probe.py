"""Tests DNS and network from one of the pods that `finetune doctor` starts, in which it runs the source of this file.

It prints its result as a line of JSON whenever it changes, and ends when the pods have reached each other. It uses only
the standard library of Python 3.9, because it runs in the image of the job.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

CONNECT_TIMEOUT_SECONDS = 3.0
PAUSE_SECONDS = 0.5


def main(arguments: list[str]) -> None:
    """Run the tests. Arguments: host name of the other pod, or "" without one; port numbers; token of this check."""
    host, ports, token = arguments[0], [int(port) for port in arguments[1].split(",")], arguments[2].encode()
    visits = [start_server(port, token) for port in ports] if host else []
    pending = {"dns", *map(str, ports)} if host else set()
    printed = None
    while True:
        errors = _find_errors(host, pending, token)
        pending = set(errors)
        if errors != printed:
            print(json.dumps(errors), flush=True)
            printed = errors
        if not pending and all(visit.is_set() for visit in visits):
            return
        time.sleep(PAUSE_SECONDS)


def start_server(port: int, token: bytes) -> threading.Event:
    """Send the token to everybody who connects to this port, and return the event of the first connection."""
    has_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    server = socket.create_server(("", port), family=family, dualstack_ipv6=has_ipv6)
    visited = threading.Event()

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(token)
            visited.set()

    threading.Thread(target=serve, daemon=True).start()
    return visited


def find_dns_error(host: str) -> str:
    """Return the error of the resolver, or "" if the name resolves."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return str(error)
    return ""


def find_connection_error(host: str, port: int, token: bytes) -> str:
    """Return why the server of the other pod cannot be reached, or "" if it sends the token."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS) as connection:
            received = connection.makefile("rb").read(len(token))
    except OSError as error:
        return str(error)
    return "" if received == token else "another program has answered"


def _find_errors(host: str, pending: set[str], token: bytes) -> dict[str, str]:
    """Return the error of each test that has not succeeded yet, by "dns" or by port."""
    if "dns" in pending and (error := find_dns_error(host)):
        return {**dict.fromkeys(pending, ""), "dns": error}
    errors = {port: find_connection_error(host, int(port), token) for port in sorted(pending - {"dns"})}
    return {port: error for port, error in errors.items() if error}


if __name__ == "__main__":
    main(sys.argv[1:])
