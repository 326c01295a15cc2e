"""Tests of the program that `finetune doctor` runs in pods, over the loopback interface."""

import json
import subprocess
import sys

import pytest

from finetune_client import pod_probe
from testing.processes.supervisors import find_free_port

TOKEN = b"0123456789abcdef"


def start_probe(host: str, *ports: int) -> subprocess.Popen[str]:
    arguments = (host, ",".join(map(str, ports)), TOKEN.decode())
    return subprocess.Popen((sys.executable, pod_probe.__file__, *arguments), stdout=subprocess.PIPE, text=True)


def test_the_probe_ends_when_both_sides_have_reached_each_other() -> None:
    process = start_probe("localhost", find_free_port(), find_free_port())  # the probe is its own peer

    output, _ = process.communicate(timeout=30)

    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1]) == {}


def test_a_single_pod_tests_no_network() -> None:
    output, _ = start_probe("", find_free_port()).communicate(timeout=30)

    assert output == "{}\n"


def test_a_name_that_does_not_resolve_leaves_the_ports_untested() -> None:
    port = find_free_port()
    process = start_probe("peer.invalid", port)
    assert process.stdout is not None
    try:
        errors = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()

    assert errors["dns"]
    assert errors[str(port)] == ""


def test_connection_errors_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_probe, "CONNECT_TIMEOUT_SECONDS", 0.2)
    port = find_free_port()
    assert "refused" in pod_probe.find_connection_error("localhost", port, TOKEN)

    visited = pod_probe.start_server(port, TOKEN)

    assert pod_probe.find_connection_error("localhost", port, TOKEN) == ""
    assert visited.wait(timeout=5)
    assert pod_probe.find_connection_error("localhost", port, TOKEN[::-1]) == "another program has answered"
