"""Tests of the pod manifest of one node."""

import json
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.plan.pod_manifest import LOST_NODE_SECONDS, build_pod, build_pods, exclude_nodes
from testing.builders.jobs import command
from testing.builders.manifests import (
    ALL_FIELDS,
    NOT_READY,
    build_first_pod_manifest,
    build_pod_manifests,
    build_run_plan,
)
from testing.builders.pod_security import find_restricted_violations

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
UNREACHABLE = "node.kubernetes.io/unreachable"


def build_tolerations(*user_tolerations: dict[str, Any]) -> dict[str, int | None]:
    """Return the tolerationSeconds of the pod manifest, indexed by taint key."""
    tolerations_of_pod = build_first_pod_manifest(podTemplate={"tolerations": list(user_tolerations)})["spec"][
        "tolerations"
    ]
    assert len({toleration["key"] for toleration in tolerations_of_pod}) == len(tolerations_of_pod)
    return {toleration["key"]: toleration.get("tolerationSeconds") for toleration in tolerations_of_pod}


@pytest.mark.parametrize("fields", [pytest.param({}, id="minimal"), pytest.param(ALL_FIELDS, id="everything")])
def test_the_pods_of_all_nodes_are_those_of_each_node(fields: dict[str, Any]) -> None:
    run_plan = build_run_plan(**{**fields, "numNodes": 3})

    assert build_pods(run_plan) == tuple(build_pod(run_plan, node) for node in run_plan.nodes)


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        pytest.param({}, None, id="no memory limit"),
        pytest.param({"memory": "16Gi"}, 8 * 1024**3, id="half the memory limit"),
        pytest.param({"memory": 1001}, 500, id="whole bytes"),
    ],
)
def test_shared_memory_has_half_of_the_memory_limit(limits: dict[str, Any], size: int | None) -> None:
    volumes = build_first_pod_manifest(resources={"limits": limits})["spec"]["volumes"]
    [shm] = [volume for volume in volumes if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory"} | ({} if size is None else {"sizeLimit": str(size)})


def test_user_toleration_overrides_the_default() -> None:
    toleration = {"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    assert build_tolerations(toleration) == {UNREACHABLE: 5, NOT_READY: LOST_NODE_SECONDS}


def test_user_toleration_for_all_taints_replaces_the_defaults() -> None:
    toleration = {"operator": "Exists"}
    assert build_first_pod_manifest(podTemplate={"tolerations": [toleration]})["spec"]["tolerations"] == [toleration]


def test_user_toleration_with_another_effect_keeps_the_default() -> None:
    toleration = {"key": NOT_READY, "operator": "Exists", "effect": "NoSchedule"}
    tolerations_of_pod = build_first_pod_manifest(podTemplate={"tolerations": [toleration]})["spec"]["tolerations"]
    assert [(toleration["key"], toleration["effect"]) for toleration in tolerations_of_pod] == [
        (NOT_READY, "NoSchedule"),
        (NOT_READY, "NoExecute"),
        (UNREACHABLE, "NoExecute"),
    ]


def test_empty_security_context_of_the_user_is_kept() -> None:
    pod_spec = build_first_pod_manifest(podTemplate={"securityContext": {}, "containerSecurityContext": {}})["spec"]
    assert (pod_spec["securityContext"], pod_spec["containers"][0]["securityContext"]) == ({}, {})


def test_operator_labels_override_user_labels() -> None:
    labels = build_first_pod_manifest(**ALL_FIELDS)["metadata"]["labels"]
    assert (labels["team"], labels[names.MANAGED_BY]) == ("a", names.MANAGER)


def test_pods_conform_to_the_restricted_pod_security_standard() -> None:
    for fields in ({}, command({"script": "train.py"})):
        for pod in build_pod_manifests(build_run_plan(**fields)):
            assert find_restricted_violations(pod) == ()


def test_only_fields_set_by_the_user_violate_the_restricted_standard() -> None:
    assert find_restricted_violations(build_first_pod_manifest(**ALL_FIELDS)) == (
        "volume models: nfs",
        "volume disk: hostPath",
        "allowPrivilegeEscalation is not false",
        "capabilities.drop lacks ALL",
        "capabilities.add",
        "runAsNonRoot is not true",
        "seccompProfile is not RuntimeDefault",
    )


def test_excluded_nodes_are_added_to_each_node_selector_term_of_the_user() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    by_name: dict[str, Any] = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-1"]}]}
    affinity = {
        "podAffinity": {"x": 1},
        "nodeAffinity": {"preferred": [], REQUIRED: {"nodeSelectorTerms": [zone, by_name]}},
    }
    before = json.dumps(affinity)

    remaining = exclude_nodes(affinity, ("gpu-7", "gpu-8"))

    assert remaining is not None
    assert remaining["podAffinity"] == {"x": 1}
    assert remaining["nodeAffinity"]["preferred"] == []
    first, second = remaining["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert first["matchExpressions"] == zone["matchExpressions"]
    assert [field["values"] for field in first["matchFields"]] == [["gpu-7"], ["gpu-8"]]
    assert [field["values"] for field in second["matchFields"]] == [["gpu-1"], ["gpu-7"], ["gpu-8"]]
    assert json.dumps(affinity) == before
