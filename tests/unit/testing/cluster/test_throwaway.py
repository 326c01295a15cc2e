"""What is done while a throwaway cluster comes up."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from testing.cluster.host.commands import ClusterError
from testing.cluster.throwaway import ThrowawayCluster


@dataclass
class Kubelet:
    """Ends as soon as it is started, as often as it is told to."""

    deaths: int
    name: str = "kubelet-node1"
    starts: int = field(default=1)

    def pid(self) -> int | None:
        return 1 if self.starts > self.deaths else None

    def start(self) -> None:
        self.starts += 1

    def require_running(self) -> None:
        if self.pid() is None:
            raise ClusterError(f"{self.name} has ended")


def wait_for(kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = SimpleNamespace(ready_nodes=lambda: {"node1"} if kubelet.pid() else set())
    monkeypatch.setattr(ThrowawayCluster, "layout", SimpleNamespace(nodes=[SimpleNamespace(name="node1")]))
    monkeypatch.setattr(ThrowawayCluster, "kubectl", kubectl)
    monkeypatch.setattr(ThrowawayCluster, "daemons", lambda self: (kubelet,))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    ThrowawayCluster.wait_until_ready(object.__new__(ThrowawayCluster))


def test_a_kubelet_that_lost_the_race_for_a_socket_is_started_again_and_one_that_fails_twice_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlucky = Kubelet(deaths=1)
    wait_for(unlucky, monkeypatch)
    assert unlucky.starts == 2

    with pytest.raises(ClusterError, match="kubelet-node1 has ended"):
        wait_for(Kubelet(deaths=2), monkeypatch)
