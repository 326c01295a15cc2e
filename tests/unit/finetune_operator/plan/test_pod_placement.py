"""Tests of scheduling gates, the host network, claims and the topology spread of pods."""

from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.plan.manifests import build_service
from testing.builders.golden import assert_golden
from testing.builders.jobs import UID
from testing.builders.manifests import build_first_pod_manifest, build_pod_manifests, build_run_plan
from testing.builders.pod_security import find_restricted_violations

HOST_NETWORK: dict[str, Any] = {
    "resources": {"limits": {"nvidia.com/gpu": 8, "rdma/hca": 8}},
    "nprocPerNode": None,
    "network": {"interface": "bond0", "nccl": {"ibHca": "mlx5", "ibGidIndex": 3}},
    "podTemplate": {"hostNetwork": True, "containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
}
RACK: dict[str, Any] = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
CASES: dict[str, dict[str, Any]] = {
    "host-network": HOST_NETWORK,
    "gates-and-spread": {
        "podTemplate": {
            "schedulingGates": [{"name": "acme.example/approval"}, {"name": "data-ready"}],
            "topologySpreadConstraints": [
                {**RACK, "minDomains": 2, "nodeTaintsPolicy": "Honor"},
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"team": "nlp"}},
                    "matchLabelKeys": [names.ATTEMPT],
                },
            ],
        },
    },
}


def read_spread(**fields: Any) -> list[dict[str, Any]]:
    spread: list[dict[str, Any]] = build_first_pod_manifest(**fields)["spec"]["topologySpreadConstraints"]
    return spread


@pytest.mark.parametrize("case", CASES)
def test_pod_equals_the_golden_file(case: str) -> None:
    assert_golden(f"pods/{case}", [build_first_pod_manifest(**CASES[case])], base="pods/nvidia-gpu")


def test_pods_on_the_host_network_declare_all_ports_on_which_they_listen() -> None:
    run = build_run_plan(**{**HOST_NETWORK, "network": {"masterPort": 29600, "interface": "bond0"}})
    for pod in build_pod_manifests(run):
        (trainer,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in trainer["ports"]}
        environment = {variable["name"]: variable.get("value") for variable in trainer["env"]}
        assert ports == {"status": 29601, "master": 29600}
        assert (environment["MASTER_PORT"], environment["FINETUNE_STATUS_PORT"]) == ("29600", "29601")

    assert {port["name"]: port["port"] for port in build_service(run)["spec"]["ports"]} == ports


def test_the_host_network_violates_the_restricted_standard() -> None:
    fields = {**HOST_NETWORK, "podTemplate": {"hostNetwork": True}, "numNodes": 1}

    assert find_restricted_violations(build_first_pod_manifest(**fields)) == ("hostNetwork is set",)


@pytest.mark.parametrize("scheduling", [None, {"queueName": "gpus"}], ids=["no queue", "queue"])
def test_spread_constraints_replace_the_default_and_select_its_pods(scheduling: dict[str, Any] | None) -> None:
    (default,) = read_spread(scheduling=scheduling)

    (spread,) = read_spread(scheduling=scheduling, podTemplate={"topologySpreadConstraints": [RACK]})

    assert spread == {**RACK, "labelSelector": default["labelSelector"]}
    selects_attempt = names.ATTEMPT in default["labelSelector"]["matchLabels"]
    assert default["labelSelector"]["matchLabels"][names.JOB_UID] == UID
    assert selects_attempt == (scheduling is None)


def test_the_selector_of_the_user_is_kept_even_if_it_is_empty() -> None:
    spread = {**RACK, "labelSelector": {}}

    assert read_spread(podTemplate={"topologySpreadConstraints": [spread]}) == [spread]
