"""How nodes meet and part, with torch's own store."""

import threading
import time
from pathlib import Path

import pytest

from finetune_supervisor.launch import rendezvous as meeting
from finetune_supervisor.launch.rendezvous import Meeting, RendezvousConnectionError, RendezvousTimeoutError
from testing.builders.nodes import node
from testing.processes.supervisors import free_port


def test_all_meet_and_the_first_stays_until_the_others_have_left(tmp_path: Path) -> None:
    port, order = free_port(), []

    def live(node_rank: int, *, later: float) -> None:
        time.sleep(later)
        met = Meeting(node(tmp_path, node_rank=node_rank, master_port=port), seconds=20)
        met.wait_for_all()
        order.append(f"met {node_rank}")
        time.sleep(later)
        met.leave(time.sleep)
        order.append(f"left {node_rank}")

    nodes = [
        threading.Thread(target=live, args=(node_rank,), kwargs={"later": 0.5 * node_rank}) for node_rank in (0, 1)
    ]
    for each in nodes:
        each.start()
    for each in nodes:
        each.join(30)

    assert sorted(order[:2]) == ["met 0", "met 1"]
    assert order[2:] == ["left 1", "left 0"]


def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    met = Meeting(node(tmp_path, nodes=4, master_port=free_port()), seconds=0.5)

    with pytest.raises(RendezvousTimeoutError, match=r"node ranks 1, 2, 3 of 4 did not come within 0s"):
        met.wait_for_all()


def test_a_node_of_another_attempt_is_not_met(tmp_path: Path) -> None:
    """A zombie that comes back finds the store of today, and nobody in it."""
    port = free_port()
    met = Meeting(node(tmp_path, attempt=2, master_port=port), seconds=1)
    zombie = Meeting(node(tmp_path, attempt=1, node_rank=1, master_port=port), seconds=1)

    with pytest.raises(RendezvousTimeoutError, match="node ranks 0 of 2"):
        zombie.wait_for_all()
    with pytest.raises(RendezvousTimeoutError, match="node ranks 1 of 2"):
        met.wait_for_all()


def test_a_master_that_is_not_there_is_named_with_its_address(tmp_path: Path) -> None:
    port = free_port()

    with pytest.raises(RendezvousConnectionError, match=rf"127\.0\.0\.1:{port}, the address of node rank 0"):
        Meeting(node(tmp_path, node_rank=1, master_port=port), seconds=1)


def test_the_first_leaves_without_those_that_never_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.3)
    paused: list[float] = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        time.sleep(seconds)

    Meeting(node(tmp_path, master_port=free_port()), seconds=1).leave(pause)

    assert 2 <= len(paused) <= 5
