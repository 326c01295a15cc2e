"""Tests of the chart's admission policies on a real API server."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from testing.builders.jobs import job as parsed_job
from testing.builders.jobs import pod, spec
from testing.processes.cluster_training import build_training_fields
from testing.processes.operator_stack import CHART, OPERATOR_NAMESPACE, OperatorInstallation, has_condition

pytestmark = [pytest.mark.cluster, pytest.mark.versions, pytest.mark.alone]
RawBody = dict[str, Any]

OPERATOR = f"--as=system:serviceaccount:{OPERATOR_NAMESPACE}:finetune-operator"
QUEUE = "example.com/queue"
POLICIES = {
    "operator": {"enabled": True},
    "jobs": {
        "maxGpus": 4,
        "images": ["registry.example/team/*"],
        "requiredPodLabels": [{"name": QUEUE, "values": ["small", "large"]}],
        "reservedNames": ["vault", "prometheus-*"],
    },
}
NO_LIMITS = {"maxGpus": 1000, "images": [], "requiredPodLabels": [], "reservedNames": []}
UNRESTRICTED_NAMESPACE = "default"  # PodSecurity would reject some pods first in a namespace with the level restricted
TOKEN = {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}


def configure(deployment: OperatorInstallation, policies: RawBody) -> None:
    setting = f"admissionPolicies={json.dumps(policies)}"
    options = ("--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "120s", "--reuse-values")
    deployment.helm("upgrade", "finetune-operator", str(CHART), *options, "--set-json", setting)


@pytest.fixture(scope="module", autouse=True)
def policies(deployment: OperatorInstallation) -> Iterator[None]:
    """Enable the policies for this module, and wait until the API server enforces all of them."""
    configure(deployment, POLICIES)
    wait_for_rejection(deployment, build_job(image="elsewhere.example/trainer"))
    for body in (build_pod(owned=False), build_pod(hostNetwork=True), build_service()):
        wait_for_rejection(deployment, body, OPERATOR)
    yield
    deployment.install_operator()
    wait_until_accepted(deployment, build_job(podTemplate={}))


def wait_for_rejection(deployment: OperatorInstallation, body: RawBody, *options: str) -> None:
    deadline = time.monotonic() + 60
    while find_rejection(deployment, body, *options) is None:
        assert time.monotonic() < deadline, f"the API server still accepts this {body['kind']}"
        time.sleep(0.5)


def find_rejection(deployment: OperatorInstallation, body: RawBody, *options: str) -> str | None:
    """Return the API server's error message for a create, or None if it accepts the object."""
    namespace = body["metadata"].get("namespace", deployment.namespace)
    arguments = ("create", "--dry-run=server", "-f", "-", "--namespace", namespace, *options)
    try:
        deployment.kubectl(*arguments, stdin=yaml.safe_dump(body))
    except RuntimeError as error:
        return str(error)
    return None


def build_job(**fields: Any) -> RawBody:
    job_spec = spec(**{"suspend": True, "podTemplate": {"labels": {QUEUE: "small"}}, **fields})
    metadata = {"name": f"limits-{secrets.token_hex(3)}"}
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata, "spec": job_spec}


def build_pod(*, owned: bool = True, namespace: str = UNRESTRICTED_NAMESPACE, **fields: Any) -> RawBody:
    """Build the operator's own pod of a node with changed spec fields; `volumes` are added."""
    body = pod(parsed_job(), 0)
    del body["status"], body["metadata"]["uid"], body["spec"]["nodeName"]
    body["metadata"]["namespace"] = namespace
    if not owned:
        del body["metadata"]["ownerReferences"]
    volumes = [*body["spec"]["volumes"], *fields.pop("volumes", ())]
    (container,) = body["spec"]["containers"]
    container["ports"] = []  # with hostNetwork, ports would have to be ports of the host
    container["securityContext"] = fields.pop("containerSecurityContext", {})
    body["spec"].update(fields, volumes=volumes)
    return body


def build_service(**fields: Any) -> RawBody:
    service_spec = {"ports": [{"port": 80}], **fields}
    return {"apiVersion": "v1", "kind": "Service", "metadata": build_pod()["metadata"], "spec": service_spec}


CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": build_pod(owned=False)["metadata"]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(build_pod(owned=False), "no controller of kind FineTuneJob", id="no owner"),
        pytest.param(build_pod(namespace="kube-system"), "found kube-system", id="system namespace"),
        pytest.param(build_pod(hostNetwork=True), "spec.hostNetwork", id="host network"),
        pytest.param(build_pod(hostPID=True), "spec.hostPID", id="host pid"),
        pytest.param(build_pod(automountServiceAccountToken=True), "automountServiceAccountToken", id="token"),
        pytest.param(build_pod(volumes=[TOKEN]), "projected ServiceAccount token", id="projected token"),
        pytest.param(
            build_pod(volumes=[{"name": "root", "hostPath": {"path": "/"}}]), "hostPath in volume root", id="host path"
        ),
        pytest.param(
            build_pod(containerSecurityContext={"privileged": True}), "found true in container trainer", id="privileged"
        ),
        pytest.param(build_pod(nodeName="node1"), "spec.nodeName", id="node"),
        pytest.param(
            build_pod(containerSecurityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
            "allowedCapabilities",
            id="root",
        ),
        pytest.param(
            build_pod(securityContext={"seccompProfile": {"type": "Unconfined"}}),
            "allowUnconfinedSeccomp",
            id="seccomp",
        ),
        pytest.param(build_service(), "headless Services", id="service with address"),
        pytest.param(CONFIG_MAP, "no controller of kind FineTuneJob", id="config map without owner"),
    ],
)
def test_operator_account_cannot_create_an_object_that_breaks_a_rule(
    deployment: OperatorInstallation, body: RawBody, message: str
) -> None:
    rejection = find_rejection(deployment, body, OPERATOR)

    assert rejection is not None
    assert message in rejection
    assert "ValidatingAdmissionPolicy 'finetune-operator-" in rejection


def test_operator_account_can_create_a_pod_of_a_job(deployment: OperatorInstallation) -> None:
    assert find_rejection(deployment, build_pod(), OPERATOR) is None


def test_operator_account_cannot_delete_an_object_of_others(deployment: OperatorInstallation) -> None:
    deployment.kubectl("create", "configmap", "alien")
    try:
        with pytest.raises(RuntimeError, match="no controller of kind FineTuneJob"):
            deployment.kubectl("delete", "configmap", "alien", OPERATOR)
    finally:
        deployment.kubectl("delete", "configmap", "alien")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"numNodes": 3, "resources": {"limits": {"nvidia.com/gpu": 2}}},
            "found 3 nodes x 2 GPUs = 6; a job may have at most 4 GPUs",
            id="gpus",
        ),
        pytest.param(
            {"numNodes": 1, "resources": {"limits": {"nvidia.com/gpu": "3", "nvidia.com/mig-1g.5gb": 2}}},
            "found 1 nodes x 5 GPUs = 5; a job may have at most 4 GPUs",
            id="kinds of gpus",
        ),
        pytest.param({"image": "evil.example/registry.example/team/x"}, "registry.example/team/*", id="image"),
        pytest.param(
            {"volumes": [{"name": "base", "mountPath": "/base", "image": {"reference": "elsewhere.example/qwen:1"}}]},
            "spec.volumes: found image elsewhere.example/qwen:1; use an image that matches registry.example/team/*",
            id="image volume",
        ),
        pytest.param({"podTemplate": {"labels": {QUEUE: "huge"}}}, f"found {QUEUE}=huge; set the label to", id="label"),
        pytest.param({"podTemplate": {}}, f"found {QUEUE}=; set the label to small or large", id="no label"),
    ],
)
def test_job_over_a_limit_is_rejected(deployment: OperatorInstallation, fields: RawBody, message: str) -> None:
    body = build_job()
    body["spec"].update(fields)

    rejection = find_rejection(deployment, body)

    assert rejection is not None
    assert message in rejection


@pytest.mark.parametrize("name", ["vault", "prometheus-main"])
def test_a_new_job_cannot_take_a_reserved_name(deployment: OperatorInstallation, name: str) -> None:
    rejection = find_rejection(deployment, {**build_job(), "metadata": {"name": name}})

    assert rejection is not None
    assert f"metadata.name: found {name}; the administrator has reserved this name" in rejection
    assert find_rejection(deployment, {**build_job(), "metadata": {"name": f"my-{name}"}}) is None


def test_job_from_before_the_limits_can_be_suspended_but_not_enlarged(deployment: OperatorInstallation) -> None:
    body = build_job(resources={"limits": {"nvidia.com/gpu": 4}}, image="elsewhere.example/trainer:v1")
    name = body["metadata"]["name"]
    configure(deployment, {**POLICIES, "jobs": NO_LIMITS})
    wait_until_accepted(deployment, body)
    deployment.apply(body)
    try:
        configure(deployment, POLICIES)
        wait_for_rejection(deployment, {**body, "metadata": {"name": f"{name}-2"}})

        patch_spec(deployment, name, {"ttlSecondsAfterFinished": 60, "resources": {"limits": {"nvidia.com/gpu": 3}}})
        with pytest.raises(RuntimeError, match="found 2 nodes x 4 GPUs = 8; a job may have at most 4"):
            patch_spec(deployment, name, {"resources": {"limits": {"nvidia.com/gpu": 4}}})
    finally:
        deployment.delete(name)


def wait_until_accepted(deployment: OperatorInstallation, body: RawBody) -> None:
    deadline = time.monotonic() + 60
    while (rejection := find_rejection(deployment, body)) is not None:
        assert time.monotonic() < deadline, rejection
        time.sleep(0.5)


def patch_spec(deployment: OperatorInstallation, name: str, fields: RawBody) -> None:
    deployment.kubectl("patch", "ftj", name, "--type=merge", f"--patch={yaml.safe_dump({'spec': fields})}")


def test_job_within_the_limits_completes(deployment: OperatorInstallation, start_job: Callable[..., str]) -> None:
    training = build_training_fields(max_steps=2)
    job = start_job(numNodes=1, podTemplate={"labels": {QUEUE: "small"}}, training=training)

    assert has_condition(deployment.wait_until_finished(job), "Complete")


def test_a_job_that_was_scaled_while_it_was_suspended_cannot_be_resumed_beyond_the_limit(
    deployment: OperatorInstallation,
) -> None:
    """Whoever may create HorizontalPodAutoscalers can scale jobs without the right to change them."""
    limits, training = {"nvidia.com/gpu": "2"}, {"globalBatchSize": 128}
    job = build_job(resources={"limits": limits}, numNodes=1, training=training)
    name = job["metadata"]["name"]
    deployment.apply(job)
    try:
        scale = ("patch", "ftj", name, "--type=merge", "--subresource=scale", "-p")
        resume = ("patch", "ftj", name, "--type=merge", "-p", '{"spec":{"suspend":false}}')
        deployment.kubectl(*scale, '{"spec":{"replicas":64}}')
        with pytest.raises(RuntimeError, match="64 nodes x 2 GPUs = 128"):
            deployment.kubectl(*resume)
        deployment.kubectl(*scale, '{"spec":{"replicas":2}}')
        deployment.kubectl(*resume)
    finally:
        deployment.delete(name)


def test_expressions_match_the_types_of_the_api(deployment: OperatorInstallation) -> None:
    selector = "app.kubernetes.io/instance=finetune-operator"
    output = deployment.kubectl("get", "validatingadmissionpolicies", "-l", selector, "-o", "json")

    found = json.loads(output)["items"]

    assert len(found) == 8
    assert [policy["status"].get("typeChecking", {}) for policy in found] == [{}] * 8
