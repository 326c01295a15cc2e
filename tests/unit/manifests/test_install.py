"""Tests of the permissions, pod security and availability in install.yaml, and of generated file headers."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator import names

ROOT = Path(__file__).parents[3]
INSTALL: list[dict[str, Any]] = list(
    yaml.load_all((ROOT / "manifests" / "install.yaml").read_text(), Loader=yaml.CSafeLoader)
)
RESERVED_LABELS = (names.JOB_UID, names.ATTEMPT, names.NODE_RANK)
GENERATED = (
    "manifests/crd/finetunejobs.yaml",
    "docs/reference/finetunejob.md",
    "docs/reference/helm-values.md",
    "manifests/finetunejob.schema.json",
    "manifests/install.yaml",
    "charts/finetune-operator/files/finetunejobs.yaml",
)


def get_object(kind: str, name: str = "finetune-operator") -> dict[str, Any]:
    (body,) = (d for d in INSTALL if d["kind"] == kind and d["metadata"]["name"] == name)
    return body


def list_permissions(role: dict[str, Any]) -> set[str]:
    return {
        f"{group or 'core'}/{resource}:{verb}"
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def get_pod_spec() -> dict[str, Any]:
    spec: dict[str, Any] = get_object("Deployment")["spec"]["template"]["spec"]
    return spec


def get_container() -> dict[str, Any]:
    (container,) = get_pod_spec()["containers"]
    return dict(container)


def test_operator_has_only_the_required_permissions() -> None:
    assert list_permissions(get_object("ClusterRole")) == {
        *(f"finetune.dev/finetunejobs:{verb}" for verb in ("get", "list", "watch", "delete")),
        "finetune.dev/finetunejobs/status:update",
        "finetune.dev/finetunejobs/finalizers:update",
        *(f"core/pods:{verb}" for verb in ("get", "list", "watch", "create", "delete")),
        *(f"core/services:{verb}" for verb in ("get", "list", "watch", "create", "delete")),
        *(f"core/configmaps:{verb}" for verb in ("get", "create", "delete")),
        "core/persistentvolumeclaims:get",
        "kueue.x-k8s.io/workloads:get",
        "kueue.x-k8s.io/workloads:delete",
        "visibility.kueue.x-k8s.io/localqueues/pendingworkloads:get",
        *(f"scheduling.k8s.io/podgroups:{verb}" for verb in ("get", "create", "delete")),
        "events.k8s.io/events:create",
    }
    assert list_permissions(get_object("Role", "finetune-operator-leader")) == {
        f"coordination.k8s.io/leases:{verb}" for verb in ("get", "create", "update")
    }


def test_operator_reads_and_changes_only_its_own_lease() -> None:
    for rule in get_object("Role", "finetune-operator-leader")["rules"]:
        assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["finetune-operator"]


def test_no_role_grants_secrets_or_wildcards() -> None:
    roles = [document for document in INSTALL if document["kind"] in ("Role", "ClusterRole")]

    assert len(roles) == 4
    permissions = [permission for role in roles for permission in list_permissions(role)]
    assert [permission for permission in permissions if "*" in permission or "secrets" in permission] == []


def test_view_role_grants_only_read_access_to_jobs() -> None:
    view_role = get_object("ClusterRole", "finetune-operator-view")

    assert view_role["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {permission.rsplit(":")[-1] for permission in list_permissions(view_role)} == {"get", "list", "watch"}
    edit_role = get_object("ClusterRole", "finetune-operator-edit")
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit_role["metadata"]["labels"]


def test_bindings_refer_to_existing_roles_and_service_account() -> None:
    bindings = [document for document in INSTALL if document["kind"].endswith("RoleBinding")]

    assert len(bindings) == 2
    for binding in bindings:
        get_object(binding["roleRef"]["kind"], binding["roleRef"]["name"])
        (subject,) = binding["subjects"]
        assert get_object("ServiceAccount", subject["name"])["metadata"]["namespace"] == subject["namespace"]


def test_operator_pods_meet_the_restricted_pod_security_level() -> None:
    assert get_object("Namespace", "finetune-system")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    assert get_pod_spec()["securityContext"]["runAsNonRoot"] is True
    assert get_pod_spec()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert get_container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_only_operators_make_children_of_jobs() -> None:
    policy = get_object("ValidatingAdmissionPolicy", "finetune-operator-children")["spec"]
    binding = get_object("ValidatingAdmissionPolicyBinding", "finetune-operator-children")["spec"]

    assert binding == {"policyName": "finetune-operator-children", "validationActions": ["Deny"]}
    assert policy["failurePolicy"] == "Fail"
    resources = {resource for rule in policy["matchConstraints"]["resourceRules"] for resource in rule["resources"]}
    assert resources == {"pods", "services", "configmaps", "podgroups"}
    (condition,) = policy["matchConditions"]
    for text in (*RESERVED_LABELS, 'owner.kind == "FineTuneJob"', "owner.?controller.orValue(false)"):
        assert text in condition["expression"]
    policies = [document for document in INSTALL if document["kind"] == "ValidatingAdmissionPolicy"]
    assert len(policies) == 1


def test_disruption_budget_keeps_one_of_two_replicas_available() -> None:
    assert get_object("Deployment")["spec"]["replicas"] == 2
    budget = get_object("PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == 1
    assert budget["selector"] == get_object("Deployment")["spec"]["selector"]


def test_probes_use_the_named_port() -> None:
    assert get_container()["ports"] == [{"name": "http", "containerPort": 8080}]
    assert get_container()["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert get_container()["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_images_and_chart_have_the_project_version() -> None:
    version = next(
        line.split('"')[1] for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
    )

    assert get_container()["image"] == f"ghcr.io/finetune-operator/operator:v{version}"
    assert get_container()["env"] == [
        {"name": "FINETUNE_TRAINER_IMAGE", "value": f"ghcr.io/finetune-operator/trainer:v{version}"}
    ]
    chart = yaml.safe_load((ROOT / "charts" / "finetune-operator" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_install_yaml_does_not_mention_helm() -> None:
    assert "helm" not in (ROOT / "manifests" / "install.yaml").read_text().lower()


@pytest.mark.parametrize("path", GENERATED)
def test_first_line_of_generated_file_names_source_and_command(path: str) -> None:
    with (ROOT / path).open() as file:
        first_line = file.readline()

    assert "Generated from" in first_line
    assert "`make generate`" in first_line


def test_helm_uninstall_keeps_the_crd() -> None:
    generated_crd, chart_crd = (
        yaml.load((ROOT / path).read_text(), Loader=yaml.CSafeLoader) for path in (GENERATED[0], GENERATED[-1])
    )

    assert chart_crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert chart_crd == generated_crd
