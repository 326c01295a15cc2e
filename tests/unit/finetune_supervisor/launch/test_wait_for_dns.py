"""Tests of the DNS lookup of node rank 0 with a fake clock."""

import socket
import time
from collections.abc import Callable

import pytest

from finetune_supervisor.launch.wait_for_dns import DnsTimeout, wait_for_master


class FakeClock:
    """Clock that advances only during pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lookups_at: list[float] = []

    def pause(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def build_getaddrinfo(clock: FakeClock, *, resolves_at: float) -> Callable[..., list[object]]:
    def getaddrinfo(_host: str, *_: object, **__: object) -> list[object]:
        clock.lookups_at.append(clock.now)
        if clock.now < resolves_at:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    return getaddrinfo


def test_name_that_has_only_an_ipv6_address_is_resolved(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(_host: str, _port: object, family: int = socket.AF_UNSPEC, **__: object) -> list[object]:
        clock.lookups_at.append(clock.now)
        if family == socket.AF_INET:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    wait_for_master("bert-0-0.bert", node_rank=0, pause=clock.pause)

    assert clock.lookups_at == [0]


def test_node_rank_zero_looks_up_its_name_immediately(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", build_getaddrinfo(clock, resolves_at=0))

    wait_for_master("bert-0-0.bert", node_rank=0, pause=clock.pause)

    assert clock.lookups_at == [0]


def test_other_nodes_start_lookups_after_a_second_with_backoff(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", build_getaddrinfo(clock, resolves_at=60))

    wait_for_master("bert-0-0.bert", node_rank=1, pause=clock.pause)

    gaps = [after - before for before, after in zip(clock.lookups_at, clock.lookups_at[1:], strict=False)]
    assert clock.lookups_at[0] == 1
    assert gaps == sorted(gaps)
    assert max(gaps) <= 10


def test_name_that_never_resolves_raises_dns_timeout(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", build_getaddrinfo(clock, resolves_at=1e9))

    with pytest.raises(DnsTimeout, match=r"bert-0-0\.bert.* did not resolve within 1800s .*Name or service not known"):
        wait_for_master("bert-0-0.bert", node_rank=1, pause=clock.pause)

    assert clock.now == pytest.approx(1800)


@pytest.mark.parametrize("host", ["127.0.0.1", "fd00::7", "localhost"])
def test_address_needs_no_dns_lookup(clock: FakeClock, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", build_getaddrinfo(clock, resolves_at=1e9))

    wait_for_master(host, node_rank=1, pause=clock.pause)

    assert clock.lookups_at == []


def test_lookup_of_an_optional_name_has_a_short_timeout(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of node rank 0 may have terminated before another node starts."""
    monkeypatch.setattr(socket, "getaddrinfo", build_getaddrinfo(clock, resolves_at=1000))

    wait_for_master("bert-0-0.bert", node_rank=1, pause=clock.pause, is_name_required=False)

    assert 30 <= clock.now < 45
