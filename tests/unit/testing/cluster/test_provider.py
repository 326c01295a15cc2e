"""Which cluster tests and the demo get."""

from pathlib import Path

import pytest

from testing.cluster import provider
from testing.cluster.current import CurrentProvider
from testing.cluster.host.commands import ClusterError
from testing.cluster.kind import KindProvider
from testing.cluster.provider import ClusterKind, ThrowawayProvider, choose_provider


def machine(
    monkeypatch: pytest.MonkeyPatch, *, kind: str | None = None, throwaway: str | None = None, go: str | None = None
) -> None:
    """What stands in the way of each; None is nothing."""
    monkeypatch.setattr(provider, "reason_kind_cannot_run", lambda: kind)
    monkeypatch.setattr(provider, "reason_it_cannot_run", lambda: throwaway)
    monkeypatch.setattr(provider, "reason_there_is_no_go", lambda: go)


def test_kind_is_taken_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)

    choice = choose_provider({})

    assert choice.kind is ClusterKind.KIND
    assert isinstance(choice.provider, KindProvider)
    assert choice.provider.chaos is None


def test_a_capable_root_machine_without_docker_gets_the_throwaway_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, kind="Docker does not run")

    choice = choose_provider({})

    assert choice.kind is ClusterKind.THROWAWAY
    assert isinstance(choice.provider, ThrowawayProvider)
    assert choice.provider.chaos is not None
    assert "Docker does not run" in choice.why


@pytest.mark.parametrize("lacking", ["throwaway", "go"])
def test_a_machine_that_can_have_neither_is_told_both_reasons(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    machine(monkeypatch, kind="Docker does not run", **{lacking: "something is missing"})

    choice = choose_provider({})

    assert choice.provider is None
    assert choice.kind is ClusterKind.NONE
    assert choice.why == "Docker does not run; something is missing"


def test_the_environment_decides_before_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, kind="Docker does not run")

    assert choose_provider({"CLUSTER": "kind"}).kind is ClusterKind.KIND
    assert choose_provider({"CLUSTER": "none"}).provider is None
    with pytest.raises(ClusterError, match="CLUSTER=minikube: expected one of"):
        choose_provider({"CLUSTER": "minikube"})


def test_an_existing_cluster_must_say_how_images_and_files_get_there(tmp_path: Path) -> None:
    settings = {"CLUSTER": "current", "KUBECONFIG": "/a/config:/b/config"}
    with pytest.raises(ClusterError, match="CLUSTER_SHARED_FOLDER"):
        choose_provider(settings)

    chosen = choose_provider({**settings, "CLUSTER_SHARED_FOLDER": str(tmp_path), "CLUSTER_LOAD_IMAGE": "load it"})

    assert isinstance(chosen.provider, CurrentProvider)
    assert chosen.provider.kubeconfig == Path("/a/config")
    assert chosen.provider.shared_claim("jobs", "models")[1]["spec"]["hostPath"]["path"] == f"{tmp_path}/jobs/models"
