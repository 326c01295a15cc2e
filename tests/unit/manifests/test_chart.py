"""The chart, rendered: settings do what they say, and wrong ones are refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from check_manifests import CHART_SETTINGS
from finetune_operator.names import JOB_NAME
from helm import CHART, find_helm, render_chart
from kubernetes_schema import load_kubernetes_schema


@pytest.fixture(scope="module")
def helm() -> Path:
    found = find_helm()
    if found is None:
        pytest.skip("there is neither helm nor Go to build it")
    return found


def rendered(helm: Path, *settings: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(render_chart(helm, *settings)) if document]


def kinds(documents: list[dict[str, Any]]) -> list[str]:
    return sorted({document["kind"] for document in documents})


def arguments(documents: list[dict[str, Any]]) -> list[str]:
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    found: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    assert set(schema["properties"]) - {"global"} == set(values)


def test_with_namespaces_the_operator_has_no_rights_elsewhere(helm: Path) -> None:
    documents = rendered(helm, 'watchNamespaces=["a","b"]', "userRoles=false")

    assert "ClusterRole" not in kinds(documents)
    assert "ClusterRoleBinding" not in kinds(documents)
    roles = [d["metadata"] for d in documents if d["kind"] == "Role"]
    assert [(role["namespace"], role["name"]) for role in roles] == [
        ("a", "finetune-operator"),
        ("b", "finetune-operator"),
        ("finetune-system", "finetune-operator-leader"),
    ]
    assert arguments(documents)[-2:] == ["--namespace=a", "--namespace=b"]


def test_one_replica_has_no_disruption_budget(helm: Path) -> None:
    assert "PodDisruptionBudget" not in kinds(rendered(helm, "replicas=1"))


def test_the_crd_can_be_left_to_somebody_else(helm: Path) -> None:
    assert "CustomResourceDefinition" not in kinds(rendered(helm, "installCRD=false"))


def test_an_image_of_ones_own(helm: Path) -> None:
    image = 'image={"repository":"registry.example/operator","tag":"v9","pullPolicy":"Never"}'
    documents = rendered(helm, image, 'trainerImage="registry.example/trainer:v9"')

    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example/operator:v9", "Never")
    assert container["env"] == [{"name": "FINETUNE_TRAINER_IMAGE", "value": "registry.example/trainer:v9"}]


def test_training_pods_hear_their_peers_the_operator_and_who_scrapes_them(helm: Path) -> None:
    scraper = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    settings = json.dumps({"enabled": True, "metricsFrom": [scraper]})
    documents = rendered(helm, f"networkPolicy={settings}", 'watchNamespaces=["a","b"]')

    own, *training = (document for document in documents if document["kind"] == "NetworkPolicy")
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    assert own["spec"]["podSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    assert [policy["metadata"]["namespace"] for policy in training] == ["a", "b"]
    for policy in training:
        peers, status = policy["spec"]["ingress"]
        (ours,) = policy["spec"]["podSelector"]["matchExpressions"]
        assert ours == {"key": JOB_NAME, "operator": "Exists"}
        assert peers == {"from": [{"podSelector": {"matchExpressions": [ours]}}]}
        operator, scraping = status["from"]
        assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "finetune-system"}}
        assert operator["podSelector"] == own["spec"]["podSelector"]
        assert scraping == scraper
        assert status["ports"] == [{"port": "status", "protocol": "TCP"}]


def test_no_policy_is_made_unasked(helm: Path) -> None:
    assert "NetworkPolicy" not in kinds(rendered(helm, 'watchNamespaces=["a"]'))


@pytest.mark.parametrize("setting", ['replicas="two"', "replicaCount=2", "watchNamespaces=[1]", 'image="x:v1"'])
def test_a_wrong_value_is_refused(helm: Path, setting: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        render_chart(helm, setting)


@pytest.mark.parametrize("settings", CHART_SETTINGS.values(), ids=CHART_SETTINGS)
def test_kubernetes_own_schema_finds_a_planted_mistake(helm: Path, settings: tuple[str, ...]) -> None:
    schema = load_kubernetes_schema()
    if schema is None:
        pytest.skip("Kubernetes' schema is in a Go module, and Go is not installed")
    (deployment,) = (document for document in rendered(helm, *settings) if document["kind"] == "Deployment")
    assert list(schema.problems(deployment)) == []

    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}

    (problem,) = schema.problems(deployment)
    assert "livenesProbe" in problem
