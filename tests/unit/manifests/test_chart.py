"""Tests of the rendered chart and the validation of its values."""

import json
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from check_manifests import CHART_SETTINGS
from finetune_api.v1alpha1.devices import DEVICE_KINDS
from finetune_operator.names import JOB_NAME
from helm import CHART, render_chart
from kubernetes_schema import load_kubernetes_schema
from run_matrix import CLUSTERS
from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.versions import PINNED, parse_kubernetes_minor


def render_documents(helm: Path, *settings: str) -> list[dict[str, Any]]:
    """Return the objects of an installation, without the CRD and those of `helm test`."""
    text = render_chart(helm, "installCRD=false", *settings, has_tests=False)
    return [document for document in yaml.safe_load_all(text) if document]


def list_kinds(documents: list[dict[str, Any]]) -> list[str]:
    return sorted({document["kind"] for document in documents})


def get_operator_arguments(documents: list[dict[str, Any]]) -> list[str]:
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    args: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def test_values_and_values_schema_have_the_same_keys() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    assert set(schema["properties"]) == set(values)


def read_version_table() -> list[list[str]]:
    """Return the rows of the table of Kubernetes versions: version, IP family, tests, result."""
    page = (CHART.parents[1] / "docs" / "operations" / "installation.md").read_text()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| 1.")]


def test_chart_states_the_kubernetes_versions_on_which_tests_ran() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    tested = sorted({version for version, _, _, result in read_version_table() if result != "not run"})

    assert chart["annotations"]["finetune.dev/tested-kubernetes"] == ", ".join(tested)
    assert chart["kubeVersion"] == f">=1.{parse_kubernetes_minor(tested[0])}.0-0"


def test_page_has_a_row_for_every_cluster_on_which_tests_run() -> None:
    families = {IpFamily.IPV4: "IPv4", IpFamily.IPV6: "IPv6", IpFamily.DUAL: "dual stack"}
    clusters = {(cluster.kubernetes, families[cluster.ip_family]) for cluster in CLUSTERS}

    rows = [(version, family) for version, family, _, _ in read_version_table()]

    assert {*rows} >= {(PINNED.kubernetes, "IPv4"), *clusters}
    assert len(rows) == len({*rows})


def test_chart_is_rejected_by_older_kubernetes_versions(helm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    minor = int(chart["kubeVersion"].removeprefix(">=").split(".")[1])
    command = [str(helm), "template", "finetune-operator", str(CHART), "--kube-version"]

    assert subprocess.run([*command, f"1.{minor}.0"], check=False).returncode == 0
    assert subprocess.run([*command, f"1.{minor - 1}.99"], check=False).returncode != 0
    assert "chart requires kubeVersion" in capfd.readouterr().err


def test_operator_with_watched_namespaces_has_no_cluster_roles(helm: Path) -> None:
    documents = render_documents(helm, 'watchNamespaces=["a","b"]', "userRoles=false")

    assert "ClusterRole" not in list_kinds(documents)
    assert "ClusterRoleBinding" not in list_kinds(documents)
    roles = [d["metadata"] for d in documents if d["kind"] == "Role"]
    assert [(role["namespace"], role["name"]) for role in roles] == [
        ("a", "finetune-operator"),
        ("b", "finetune-operator"),
        ("finetune-system", "finetune-operator-leader"),
    ]
    assert get_operator_arguments(documents)[-2:] == ["--namespace=a", "--namespace=b"]


def test_single_replica_has_no_disruption_budget(helm: Path) -> None:
    assert "PodDisruptionBudget" not in list_kinds(render_documents(helm, "replicas=1"))


def test_crd_is_optional(helm: Path) -> None:
    assert "\nkind: CustomResourceDefinition" in render_chart(helm)
    assert "CustomResourceDefinition" not in list_kinds(render_documents(helm))


def test_images_are_configurable(helm: Path) -> None:
    image = 'image={"repository":"registry.example/operator","tag":"v9","pullPolicy":"Never"}'
    documents = render_documents(helm, image, 'trainerImage="registry.example/trainer:v9"')

    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example/operator:v9", "Never")
    assert container["env"] == [{"name": "FINETUNE_TRAINER_IMAGE", "value": "registry.example/trainer:v9"}]


@pytest.mark.parametrize(("seconds", "value"), [("2592000", ["2592000"]), ("0", ["0"]), ("null", [])])
def test_default_ttl_is_passed_to_the_operator_if_it_is_set(helm: Path, seconds: str, value: list[str]) -> None:
    documents = render_documents(helm, f'defaults={{"ttlSecondsAfterFinished":{seconds}}}')

    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [e["value"] for e in container["env"] if e["name"] == "FINETUNE_DEFAULT_TTL_SECONDS"] == value


def test_an_operator_that_deletes_no_jobs_has_no_right_to_do_so(helm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    documents = render_documents(helm, "deleteFinishedJobs=false")

    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "FINETUNE_DELETE_FINISHED_JOBS", "value": "false"} in environment
    (role,) = (d for d in documents if d["kind"] == "ClusterRole" and d["metadata"]["name"] == "finetune-operator")
    assert next(rule["verbs"] for rule in role["rules"] if rule["resources"] == ["finetunejobs"]) == [
        "get",
        "list",
        "watch",
    ]
    with pytest.raises(subprocess.CalledProcessError):
        render_documents(helm, "deleteFinishedJobs=false", 'defaults={"ttlSecondsAfterFinished":60}')
    assert "deleteFinishedJobs is false" in capfd.readouterr().err


def test_notifications_are_configured_without_permission_to_read_secrets(helm: Path) -> None:
    settings = {"url": "https://sink.example/events", "source": "https://cluster.example", "secretName": "sink"}
    documents, default_documents = (
        render_documents(helm, *flags) for flags in ((f"notifications={json.dumps(settings)}",), ())
    )

    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["FINETUNE_NOTIFICATION_URL"] == settings["url"]
    assert variables["FINETUNE_NOTIFICATION_SOURCE"] == settings["source"]
    assert variables["FINETUNE_NOTIFICATION_SECRETS"] == "/etc/finetune/notifications"
    assert {"name": "notifications", "secret": {"secretName": "sink"}} in pod["volumes"]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "notifications")
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/finetune/notifications", True)
    roles, default_roles = (
        [d["rules"] for d in each if d["kind"] in ("Role", "ClusterRole")] for each in (documents, default_documents)
    )
    assert roles == default_roles
    assert "FINETUNE_NOTIFICATION" not in json.dumps(default_documents)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        pytest.param({"url": "ftp://sink.example"}, "pattern", id="another scheme"),
        pytest.param({"url": "https://user:password@sink.example"}, "pattern", id="credentials in the URL"),
        pytest.param({"url": "https://sink.example/#fragment"}, "pattern", id="fragment"),
        pytest.param({"url": "https://sink.example", "token": "x"}, "token", id="token in the values"),
    ],
)
def test_invalid_settings_of_notifications_are_rejected(
    helm: Path, capfd: pytest.CaptureFixture[str], settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        render_chart(helm, f"notifications={json.dumps(settings)}")

    assert problem in capfd.readouterr().err


def test_training_pods_accept_traffic_only_from_peers_operator_and_scrapers(helm: Path) -> None:
    scraper = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    settings = json.dumps({"enabled": True, "metricsFrom": [scraper]})
    documents = render_documents(helm, f"networkPolicy={settings}", 'watchNamespaces=["a","b"]')

    operator_policy, *training_policies = (document for document in documents if document["kind"] == "NetworkPolicy")
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    assert operator_policy["spec"]["podSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    assert [policy["metadata"]["namespace"] for policy in training_policies] == ["a", "b"]
    for policy in training_policies:
        peers, status = policy["spec"]["ingress"]
        (job_pods,) = policy["spec"]["podSelector"]["matchExpressions"]
        assert job_pods == {"key": JOB_NAME, "operator": "Exists"}
        assert peers == {"from": [{"podSelector": {"matchExpressions": [job_pods]}}]}
        operator, metrics_scraper = status["from"]
        assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "finetune-system"}}
        assert operator["podSelector"] == operator_policy["spec"]["podSelector"]
        assert metrics_scraper == scraper
        assert status["ports"] == [{"port": "status", "protocol": "TCP"}]


def test_network_policies_without_namespaces_are_rejected(helm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the policy of the operator would be created, and training pods would stay unprotected without a message."""
    with pytest.raises(subprocess.CalledProcessError):
        render_chart(helm, 'networkPolicy={"enabled":true}')

    assert "set networkPolicy.namespaces or watchNamespaces" in capfd.readouterr().err


def test_network_policies_are_disabled_by_default(helm: Path) -> None:
    assert "NetworkPolicy" not in list_kinds(render_documents(helm, 'watchNamespaces=["a"]'))


def find_policies(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the admission policies by name."""
    policies = (document for document in documents if document["kind"] == "ValidatingAdmissionPolicy")
    return {policy["metadata"]["name"]: policy["spec"] for policy in policies}


@pytest.mark.parametrize(
    ("settings", "is_created"),
    [
        ((), True),
        (('watchNamespaces=["team"]',), True),
        (('watchNamespaces=["team"]', "installCRD=false", "userRoles=false"), False),
        (('admissionPolicies.children={"enabled":true}', 'watchNamespaces=["team"]', "userRoles=false"), True),
        (('admissionPolicies.children={"enabled":false}',), False),
    ],
)
def test_only_the_policy_for_children_is_created_by_default(
    helm: Path, settings: tuple[str, ...], is_created: bool
) -> None:
    """A release that creates nothing else in the whole cluster needs no rights for it."""
    policies = find_policies(render_documents(helm, *settings))
    assert set(policies) == ({"finetune-operator-children"} if is_created else set())


def test_operator_policies_apply_to_the_operators_account_only(helm: Path) -> None:
    documents = render_documents(helm, 'admissionPolicies.operator={"enabled":true}')

    policies = find_policies(documents)
    bindings = [d["spec"] for d in documents if d["kind"] == "ValidatingAdmissionPolicyBinding"]
    suffixes = ("owned", "services", "pods", "jobs-ttl", "podgroups", "workloads")
    assert set(policies) == {"finetune-operator-children", *(f"finetune-operator-{suffix}" for suffix in suffixes)}
    assert {binding["policyName"] for binding in bindings} == set(policies)
    del policies["finetune-operator-children"]
    for policy in policies.values():
        (condition,) = policy["matchConditions"]
        assert condition["expression"].endswith('== "system:serviceaccount:finetune-system:finetune-operator"')


@pytest.mark.parametrize("option", ["allowHostNetwork", "allowHostPath", "allowPrivileged", "allowUnconfinedSeccomp"])
def test_operator_policy_can_permit_host_access_of_trusted_jobs(helm: Path, option: str) -> None:
    strict, permissive = (
        find_policies(render_documents(helm, f'admissionPolicies.operator={{"enabled":true,"{option}":{value}}}'))
        for value in ("false", "true")
    )

    pods = "finetune-operator-pods"
    removed = [rule for rule in strict[pods]["validations"] if rule not in permissive[pods]["validations"]]
    assert len(removed) == 1
    assert option in (removed[0].get("message") or removed[0]["messageExpression"])


@pytest.mark.parametrize(
    ("limit", "fields"),
    [
        pytest.param(
            '"maxGpus":0', ["spec.podTemplate.resourceClaims", "spec.numNodes, spec.resources.limits"], id="gpus"
        ),
        pytest.param('"images":["registry.example/*"]', ["spec.image", "spec.volumes"], id="images"),
        pytest.param('"requiredPodLabels":[{"name":"queue"}]', ["spec.podTemplate.labels"], id="labels"),
        pytest.param('"reservedNames":["vault"]', ["metadata.name"], id="names"),
    ],
)
def test_only_limits_that_are_set_are_checked(helm: Path, limit: str, fields: list[str]) -> None:
    policies = find_policies(render_documents(helm, f"admissionPolicies.jobs={{{limit}}}"))

    rules = policies["finetune-operator-jobs"]["validations"]
    messages = [rule.get("message") or rule["messageExpression"] for rule in rules]
    assert all(field in message for field, message in zip(fields, messages, strict=True))


def test_the_policy_counts_the_devices_that_the_operator_knows() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["admissionPolicies"]["jobs"]["gpuResources"]
    for kind in DEVICE_KINDS:
        resource = kind.resource.replace("*", "x")
        assert any(fnmatch(resource, pattern) for pattern in values), kind.resource
    assert any(fnmatch("deviceclass.resource.kubernetes.io/any", pattern) for pattern in values)


def test_star_in_an_image_pattern_stands_for_any_characters(helm: Path) -> None:
    policies = find_policies(render_documents(helm, 'admissionPolicies.jobs={"images":["a.example/*","b:v1"]}'))

    rules = policies["finetune-operator-jobs"]["validations"]
    assert len(rules) == 2
    assert all(r'matches("^(a\\.example/.*|b:v1)$")' in rule["expression"] for rule in rules)


@pytest.mark.parametrize(
    "setting",
    [
        'admissionPolicies.jobs={"maxGpu":8}',
        'admissionPolicies.jobs={"maxGpus":-1}',
        'admissionPolicies.jobs={"images":["a"b"]}',
        'admissionPolicies.jobs={"validationActions":[]}',
    ],
)
def test_invalid_limit_is_rejected(helm: Path, setting: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        render_chart(helm, setting)


@pytest.mark.parametrize(
    "setting",
    [
        'replicas="two"',
        "replicaCount=2",
        "watchNamespaces=[1]",
        'image="x:v1"',
        'defaults={"ttlSecondsAfterFinished":"30d"}',
    ],
)
def test_invalid_value_is_rejected(helm: Path, setting: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        render_chart(helm, setting)


@pytest.mark.parametrize("settings", CHART_SETTINGS.values(), ids=CHART_SETTINGS)
def test_kubernetes_schema_detects_a_misspelt_field(helm: Path, settings: tuple[str, ...]) -> None:
    schema = load_kubernetes_schema()
    if schema is None:
        pytest.skip("the schema of Kubernetes is in a Go module, and Go is not installed")
    (deployment,) = (document for document in render_documents(helm, *settings) if document["kind"] == "Deployment")
    assert list(schema.find_problems(deployment)) == []

    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}

    (problem,) = schema.find_problems(deployment)
    assert "livenesProbe" in problem
