"""Tests of starting a throwaway cluster."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from testing.cluster.host.commands import HarnessError
from testing.cluster.throwaway import ThrowawayCluster


@dataclass
class FakeKubelet:
    """A kubelet that exits immediately on its first `exit_count` starts."""

    exit_count: int
    name: str = "kubelet-node1"
    start_count: int = field(default=1)

    def pid(self) -> int | None:
        return 1 if self.start_count > self.exit_count else None

    def start(self) -> None:
        self.start_count += 1

    def require_running(self) -> None:
        if self.pid() is None:
            raise HarnessError(f"{self.name} has ended")


def wait_until_ready(kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = SimpleNamespace(list_ready_nodes=lambda: {"node1"} if kubelet.pid() else set(), succeeds=lambda *_: True)
    monkeypatch.setattr(ThrowawayCluster, "layout", SimpleNamespace(nodes=[SimpleNamespace(name="node1")]))
    monkeypatch.setattr(ThrowawayCluster, "kubectl", kubectl)
    monkeypatch.setattr(ThrowawayCluster, "daemons", lambda self: (kubelet,))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    ThrowawayCluster.wait_until_ready(object.__new__(ThrowawayCluster))


def test_kubelet_is_restarted_only_once_after_an_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kubelet = FakeKubelet(exit_count=1)
    wait_until_ready(kubelet, monkeypatch)
    assert kubelet.start_count == 2

    with pytest.raises(HarnessError, match="kubelet-node1 has ended"):
        wait_until_ready(FakeKubelet(exit_count=2), monkeypatch)
