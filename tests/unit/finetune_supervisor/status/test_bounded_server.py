"""Tests of the limits of the status server: connections, time and size of a request."""

import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from finetune_supervisor import contract
from finetune_supervisor.status import bounded_server
from finetune_supervisor.status.bounded_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES, BoundedServer
from finetune_supervisor.status.http_server import NodeSnapshot, start_status_server
from testing.builders.nodes import node
from testing.processes.ip_support import LOOPBACK_ADDRESSES


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BoundedServer]:
    server = start_status_server(node(tmp_path), lambda: NodeSnapshot(contract.TRAIN, contract.RUNNING, ()))
    yield server
    server.shutdown()
    server.server_close()


def connect(server: BoundedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30)


def read_status(server: BoundedServer) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/status", timeout=10) as response:
        return int(response.status)


def read_until_closed(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes or resets the connection."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


@pytest.mark.parametrize("address", LOOPBACK_ADDRESSES)
def test_status_is_served_over_both_ip_families(server: BoundedServer, address: str) -> None:
    connection = HTTPConnection(address, server.server_address[1], timeout=10)
    connection.request("GET", "/status")

    assert connection.getresponse().status == 200


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no address 127.0.0.2 by default")
def test_a_server_of_local_mode_listens_on_its_own_address_only(tmp_path: Path) -> None:
    this_node = node(tmp_path, status_host="127.0.0.1")
    server = start_status_server(this_node, lambda: NodeSnapshot(contract.TRAIN, contract.RUNNING, ()))
    try:
        assert read_status(server) == 200
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.server_address[1]), timeout=10)
    finally:
        server.shutdown()
        server.server_close()


def test_many_slow_connections_neither_exhaust_threads_nor_block_short_requests(server: BoundedServer) -> None:
    threads_before = threading.active_count()
    peak_threads = 0
    with ExitStack() as stack:
        for index in range(20 * MAX_CONNECTIONS):
            connection = stack.enter_context(connect(server))
            connection.sendall(b"GET /status HTTP/1.1\r\n")
            if index % 100 == 99:
                assert read_status(server) == 200
            peak_threads = max(peak_threads, threading.active_count())

    assert peak_threads - threads_before <= MAX_CONNECTIONS


def test_request_that_arrives_byte_by_byte_ends_at_its_deadline(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_server, "REQUEST_SECONDS", 0.5)
    started_at = time.monotonic()

    with connect(server) as connection, suppress(ConnectionError):
        while time.monotonic() < started_at + 20:
            connection.sendall(b"G")
            time.sleep(0.05)

    assert time.monotonic() - started_at < 5


def test_request_over_the_size_limit_gets_no_response(server: BoundedServer) -> None:
    header = b"X-Header: " + b"x" * 60_000 + b"\r\n"
    with connect(server) as connection:
        with suppress(ConnectionError):
            connection.sendall(b"GET /status HTTP/1.1\r\n" + header * 2 + b"\r\n")

        assert read_until_closed(connection) == b""
    assert len(header) * 2 > MAX_REQUEST_BYTES


def test_thread_that_cannot_be_started_does_not_use_up_a_slot(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail_to_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_to_start)
        for _ in range(2 * MAX_CONNECTIONS):
            with connect(server) as connection:
                assert read_until_closed(connection) == b""

    assert read_status(server) == 200
    assert "can't start new thread" in capfd.readouterr().err
