"""Tests of selecting a cluster for tests and the demo."""

from pathlib import Path

import pytest

from testing.cluster import provider
from testing.cluster.current import CurrentContextProvider
from testing.cluster.host.commands import HarnessError
from testing.cluster.provider import ClusterKind, ThrowawayProvider, choose_provider


def patch_host(
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind_problem: str | None = None,
    throwaway_problem: str | None = None,
    go_problem: str | None = None,
) -> None:
    """Patch the problems that are detected for kind, the throwaway cluster and Go; None means that there is none."""
    monkeypatch.setattr(provider, "find_kind_problem", lambda: kind_problem)
    monkeypatch.setattr(provider, "find_host_problem", lambda: throwaway_problem)
    monkeypatch.setattr(provider, "find_go_problem", lambda: go_problem)


def test_throwaway_cluster_is_selected_without_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_host(monkeypatch, kind_problem="Docker does not run")

    choice = choose_provider({})

    assert choice.kind is ClusterKind.THROWAWAY
    assert isinstance(choice.provider, ThrowawayProvider)
    assert choice.provider.chaos is not None
    assert "Docker does not run" in choice.explanation


@pytest.mark.parametrize("problem_argument", ["throwaway_problem", "go_problem"], ids=["throwaway cluster", "Go"])
def test_explanation_contains_both_reasons_if_no_cluster_is_available(
    monkeypatch: pytest.MonkeyPatch, problem_argument: str
) -> None:
    patch_host(monkeypatch, kind_problem="Docker does not run", **{problem_argument: "something is missing"})

    choice = choose_provider({})

    assert choice.provider is None
    assert choice.kind is ClusterKind.NONE
    assert choice.explanation == "Docker does not run; something is missing"


def test_environment_variable_overrides_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_host(monkeypatch, kind_problem="Docker does not run")

    assert choose_provider({"CLUSTER": "kind"}).kind is ClusterKind.KIND
    assert choose_provider({"CLUSTER": "none"}).provider is None
    with pytest.raises(HarnessError, match="CLUSTER=minikube: expected one of"):
        choose_provider({"CLUSTER": "minikube"})


def test_current_cluster_requires_shared_folder_and_load_command(tmp_path: Path) -> None:
    settings = {"CLUSTER": "current", "KUBECONFIG": "/a/config:/b/config"}
    with pytest.raises(HarnessError, match="CLUSTER_SHARED_FOLDER"):
        choose_provider(settings)

    choice = choose_provider({**settings, "CLUSTER_SHARED_FOLDER": str(tmp_path), "CLUSTER_LOAD_IMAGE": "load it"})

    assert isinstance(choice.provider, CurrentContextProvider)
    assert choice.provider.kubeconfig == Path("/a/config")
    assert (
        choice.provider.build_shared_claim_objects("jobs", "models")[1]["spec"]["hostPath"]["path"]
        == f"{tmp_path}/jobs/models"
    )
