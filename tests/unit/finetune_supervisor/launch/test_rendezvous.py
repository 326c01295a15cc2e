"""Tests of the rendezvous with a real TCPStore."""

import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune_supervisor.launch import rendezvous as rendezvous_module
from finetune_supervisor.launch.rendezvous import Rendezvous, RendezvousConnectionError, RendezvousTimeoutError
from testing.builders.nodes import node
from testing.processes.ip_support import LOOPBACK_ADDRESSES
from testing.processes.supervisors import find_free_port


@pytest.mark.parametrize("master_addr", LOOPBACK_ADDRESSES)
def test_all_nodes_join_and_node_rank_zero_leaves_last(tmp_path: Path, master_addr: str) -> None:
    port, order = find_free_port(), []

    def join_and_leave(node_rank: int, *, delay_seconds: float) -> None:
        time.sleep(delay_seconds)
        this_node = node(tmp_path, node_rank=node_rank, master_addr=master_addr, master_port=port)
        rendezvous = Rendezvous(this_node, timeout_seconds=20)
        rendezvous.wait_for_all()
        order.append(f"joined {node_rank}")
        time.sleep(delay_seconds)
        rendezvous.leave(time.sleep)
        order.append(f"left {node_rank}")

    threads = [
        threading.Thread(target=join_and_leave, args=(node_rank,), kwargs={"delay_seconds": 0.2 * node_rank})
        for node_rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(order[:2]) == ["joined 0", "joined 1"]
    assert order[2:] == ["left 1", "left 0"]


def test_missing_nodes_are_named_in_the_error(tmp_path: Path) -> None:
    rendezvous = Rendezvous(node(tmp_path, num_nodes=4, master_port=find_free_port()), timeout_seconds=0.5)

    with pytest.raises(RendezvousTimeoutError, match=r"node ranks 1, 2, 3 of 4 did not join within 0s"):
        rendezvous.wait_for_all()


def test_nodes_of_different_attempts_do_not_share_a_rendezvous(tmp_path: Path) -> None:
    """A zombie of an earlier attempt can connect to the store, but not join the current attempt."""
    port = find_free_port()
    rendezvous = Rendezvous(node(tmp_path, attempt=2, master_port=port), timeout_seconds=0.5)
    zombie = Rendezvous(node(tmp_path, attempt=1, node_rank=1, master_port=port), timeout_seconds=0.5)

    with pytest.raises(RendezvousTimeoutError, match="node ranks 0 of 2"):
        zombie.wait_for_all()
    with pytest.raises(RendezvousTimeoutError, match="node ranks 1 of 2"):
        rendezvous.wait_for_all()


def test_unreachable_master_is_reported_with_its_address(tmp_path: Path) -> None:
    port = find_free_port()

    with pytest.raises(RendezvousConnectionError, match=rf"127\.0\.0\.1:{port}, the address of node rank 0"):
        Rendezvous(node(tmp_path, node_rank=1, master_port=port), timeout_seconds=0.5)


def test_node_rank_zero_leaves_after_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = Rendezvous(node(tmp_path, master_port=find_free_port()), timeout_seconds=1)
    pauses: list[float] = []
    monkeypatch.setattr(rendezvous_module, "LEAVE_TIMEOUT_SECONDS", 0.35)
    monkeypatch.setattr(rendezvous_module, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))

    rendezvous.leave(pauses.append)

    assert len(pauses) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no address 127.0.0.2 by default")
def test_the_store_of_local_mode_listens_on_its_own_address_only(tmp_path: Path) -> None:
    port = find_free_port()
    rendezvous = Rendezvous(node(tmp_path, num_nodes=1, master_port=port), timeout_seconds=5)

    rendezvous.wait_for_all()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)
    rendezvous.leave(time.sleep)
