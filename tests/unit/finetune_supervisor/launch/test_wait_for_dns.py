import socket
import time
from collections.abc import Callable

import pytest

from finetune_supervisor.launch.wait_for_dns import DnsTimeout, wait_for_master


class Clock:
    """Time that passes only when somebody pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked_at: list[float] = []

    def pause(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def resolver(clock: Clock, *, known_from: float) -> Callable[..., list[object]]:
    def getaddrinfo(_host: str, *_: object, **__: object) -> list[object]:
        clock.asked_at.append(clock.now)
        if clock.now < known_from:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    return getaddrinfo


def test_node_rank_zero_asks_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(clock, known_from=0))

    wait_for_master("bert-0-0.bert", node_rank=0, pause=clock.pause)

    assert clock.asked_at == [0]


def test_others_first_ask_after_a_second_and_then_ever_less_often(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(clock, known_from=60))

    wait_for_master("bert-0-0.bert", node_rank=1, pause=clock.pause)

    gaps = [after - before for before, after in zip(clock.asked_at, clock.asked_at[1:], strict=False)]
    assert clock.asked_at[0] == 1
    assert gaps == sorted(gaps)
    assert max(gaps) <= 10


def test_a_name_that_never_comes_is_an_error_with_name_and_reason(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(clock, known_from=1e9))

    with pytest.raises(DnsTimeout, match=r"bert-0-0\.bert.* did not resolve within 1800s .*Name or service not known"):
        wait_for_master("bert-0-0.bert", node_rank=1, pause=clock.pause)

    assert clock.now == pytest.approx(1800)


@pytest.mark.parametrize("host", ["127.0.0.1", "fd00::7", "localhost"])
def test_an_address_needs_no_question(clock: Clock, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(clock, known_from=1e9))

    wait_for_master(host, node_rank=1, pause=clock.pause)

    assert clock.asked_at == []


def test_a_name_that_is_not_needed_is_waited_for_a_while(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of node rank 0 may have ended before that of another node began."""
    monkeypatch.setattr(socket, "getaddrinfo", resolver(clock, known_from=1000))

    wait_for_master("bert-0-0.bert", node_rank=1, pause=clock.pause, needed=False)

    assert 30 <= clock.now < 45
