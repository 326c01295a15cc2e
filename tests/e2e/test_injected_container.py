"""Test of an injected sidecar that never exits, such as the proxy of a service mesh."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.builders.jobs import command
from testing.cluster.images.project_images import get_image_name
from testing.processes.operator_stack import OperatorInstallation, has_condition

pytestmark = pytest.mark.cluster
LABEL = {"example.com/mesh": "yes"}
IMAGE = get_image_name("operator")  # an image that contains Python

CONTAINER = f"""Object.spec.containers{{
  name: "proxy", image: "{IMAGE}", imagePullPolicy: "Never",
  command: ["python3", "-c", "import signal; signal.sigwait([signal.SIGTERM])"],
  securityContext: Object.spec.containers.securityContext{{
    allowPrivilegeEscalation: false,
    capabilities: Object.spec.containers.securityContext.capabilities{{drop: ["ALL"]}}
  }}
}}"""


@pytest.fixture
def sidecar_injection(deployment: OperatorInstallation, job_name: str) -> Iterator[None]:
    """Install an admission policy that injects a sidecar into every labelled pod."""
    group = "admissionregistration.k8s.io"
    resources = deployment.kubectl("api-resources", f"--api-group={group}", "-o", "name").split()
    if f"mutatingadmissionpolicies.{group}" not in resources:
        pytest.skip("this Kubernetes has no MutatingAdmissionPolicy")
    patch = f'[JSONPatch{{op: "add", path: "/spec/containers/-", value: {CONTAINER}}}]'
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule], "objectSelector": {"matchLabels": LABEL}},
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }
    kind, version = "MutatingAdmissionPolicy", {"apiVersion": f"{group}/v1", "metadata": {"name": job_name}}
    deployment.apply(
        {**version, "kind": kind, "spec": policy},
        {**version, "kind": f"{kind}Binding", "spec": {"policyName": job_name}},
    )
    wait_for_policy(deployment, job_name)
    yield
    deployment.kubectl("delete", f"{kind},{kind}Binding", job_name)


def wait_for_policy(deployment: OperatorInstallation, pod_name: str) -> None:
    """Wait until the API server has compiled and applied the policy."""
    container_security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod_name, "labels": LABEL},
        "spec": {
            "containers": [{"name": "any", "image": IMAGE, "securityContext": container_security}],
            "securityContext": security,
        },
    }
    deadline = time.monotonic() + 60
    while "proxy" not in deployment.kubectl(
        "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod)
    ):
        assert time.monotonic() < deadline, "the policy has no effect"
        time.sleep(0.5)


@pytest.mark.usefixtures("sidecar_injection")
def test_pod_with_a_running_sidecar_is_deleted_after_the_job_finishes(
    deployment: OperatorInstallation, start_job: Callable[..., str]
) -> None:
    program = {"exec": ["python3", "-c", "print('done')"]}
    job = start_job(**command(program, image=IMAGE, numNodes=1, podTemplate={"labels": LABEL}))

    assert has_condition(deployment.wait_until_finished(job), "Complete")
    # the kubelet starts the containers one after the other, so the sidecar may start after the trainer has ended
    deployment.kubectl("wait", "--for=jsonpath={.status.phase}=Running", f"pod/{job}-0-0", "--timeout=20s")
    [pod] = deployment.list_pods(job)
    assert [container["name"] for container in pod["spec"]["containers"]] == ["trainer", "proxy"]
    assert pod["status"]["phase"] == "Running"

    deployment.kubectl("wait", "--for=delete", f"pod/{pod['metadata']['name']}", "--timeout=90s")
