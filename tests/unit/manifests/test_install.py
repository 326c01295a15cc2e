"""What is installed may do what the operator does, and no more."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
INSTALL: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "manifests" / "install.yaml").read_text()))
GENERATED = (
    "manifests/crd/finetunejobs.yaml",
    "docs/reference/finetunejob.md",
    "manifests/finetunejob.schema.json",
    "manifests/install.yaml",
    "charts/finetune-operator/files/finetunejobs.yaml",
)


def the(kind: str, name: str = "finetune-operator") -> dict[str, Any]:
    (found,) = (d for d in INSTALL if d["kind"] == kind and d["metadata"]["name"] == name)
    return found


def granted(role: dict[str, Any]) -> set[str]:
    return {
        f"{group or 'core'}/{resource}:{verb}"
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = the("Deployment")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return dict(only)


def test_the_operator_can_do_these_things_and_nothing_else() -> None:
    assert granted(the("ClusterRole")) == {
        *(f"finetune.dev/finetunejobs:{verb}" for verb in ("get", "list", "watch", "delete")),
        "finetune.dev/finetunejobs/status:update",
        "finetune.dev/finetunejobs/finalizers:update",
        *(f"core/pods:{verb}" for verb in ("get", "list", "watch", "create", "delete")),
        *(f"core/services:{verb}" for verb in ("get", "list", "watch", "create", "delete")),
        *(f"core/configmaps:{verb}" for verb in ("get", "create", "delete")),
        "core/persistentvolumeclaims:get",
        "core/events:create",
    }
    assert granted(the("Role", "finetune-operator-leader")) == {
        f"coordination.k8s.io/leases:{verb}" for verb in ("get", "create", "update")
    }


def test_nobody_gets_secrets_or_everything() -> None:
    roles = [document for document in INSTALL if document["kind"] in ("Role", "ClusterRole")]

    assert len(roles) == 4
    assert [right for role in roles for right in granted(role) if "*" in right or "secrets" in right] == []


def test_who_may_view_a_namespace_may_view_its_jobs_and_no_more() -> None:
    view = the("ClusterRole", "finetune-operator-view")

    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {right.rsplit(":")[-1] for right in granted(view)} == {"get", "list", "watch"}
    edit = the("ClusterRole", "finetune-operator-edit")
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]


def test_bindings_bind_roles_that_are_there_to_the_operator() -> None:
    bindings = [document for document in INSTALL if document["kind"].endswith("Binding")]

    assert len(bindings) == 2
    for binding in bindings:
        the(binding["roleRef"]["kind"], binding["roleRef"]["name"])
        (subject,) = binding["subjects"]
        assert the("ServiceAccount", subject["name"])["metadata"]["namespace"] == subject["namespace"]


def test_the_operators_pods_pass_the_restricted_level() -> None:
    assert the("Namespace", "finetune-system")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_two_replicas_of_which_one_may_be_drained() -> None:
    assert the("Deployment")["spec"]["replicas"] == 2
    budget = the("PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == 1
    assert budget["selector"] == the("Deployment")["spec"]["selector"]


def test_probes_ask_the_named_port() -> None:
    assert container()["ports"] == [{"name": "http", "containerPort": 8080}]
    assert container()["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container()["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_images_are_of_this_version() -> None:
    version = next(
        line.split('"')[1] for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
    )

    assert container()["image"] == f"ghcr.io/finetune-operator/operator:v{version}"
    assert container()["env"] == [
        {"name": "FINETUNE_TRAINER_IMAGE", "value": f"ghcr.io/finetune-operator/trainer:v{version}"}
    ]
    chart = yaml.safe_load((ROOT / "charts" / "finetune-operator" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_nothing_of_helm_is_left_in_install_yaml() -> None:
    assert "helm" not in (ROOT / "manifests" / "install.yaml").read_text().lower()


@pytest.mark.parametrize("path", GENERATED)
def test_generated_files_say_so_on_line_one_and_how(path: str) -> None:
    with (ROOT / path).open() as file:
        first = file.readline()

    assert "Generated from" in first
    assert "`make generate`" in first


def test_the_charts_crd_is_kept_by_uninstall() -> None:
    plain, kept = (yaml.safe_load((ROOT / path).read_text()) for path in (GENERATED[0], GENERATED[4]))

    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert kept == plain
