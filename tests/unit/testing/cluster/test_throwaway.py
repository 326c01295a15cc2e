"""Tests of the start of a throwaway cluster."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from testing.cluster.host.commands import HarnessError
from testing.cluster.throwaway import ThrowawayCluster


@dataclass
class FakeKubelet:
    """A kubelet that exits immediately on its first `exits` starts."""

    exits: int
    name: str = "kubelet-node1"
    starts: int = field(default=1)

    def pid(self) -> int | None:
        return 1 if self.starts > self.exits else None

    def start(self) -> None:
        self.starts += 1

    def require_running(self) -> None:
        if self.pid() is None:
            raise HarnessError(f"{self.name} has ended")


def wait_until_ready(kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = SimpleNamespace(ready_nodes=lambda: {"node1"} if kubelet.pid() else set())
    monkeypatch.setattr(ThrowawayCluster, "layout", SimpleNamespace(nodes=[SimpleNamespace(name="node1")]))
    monkeypatch.setattr(ThrowawayCluster, "kubectl", kubectl)
    monkeypatch.setattr(ThrowawayCluster, "list_daemons", lambda self: (kubelet,))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    ThrowawayCluster.wait_until_ready(object.__new__(ThrowawayCluster))


def test_kubelet_is_restarted_once_after_an_early_exit_and_a_second_exit_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kubelet = FakeKubelet(exits=1)
    wait_until_ready(kubelet, monkeypatch)
    assert kubelet.starts == 2

    with pytest.raises(HarnessError, match="kubelet-node1 has ended"):
        wait_until_ready(FakeKubelet(exits=2), monkeypatch)
