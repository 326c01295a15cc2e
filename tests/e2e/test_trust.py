"""Tests that a user with the role edit in one namespace cannot use the operator against others."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from finetune_operator import names
from testing.cluster.images.project_images import get_image_name
from testing.cluster.provider import ThrowawayProvider
from testing.processes.operator_stack import (
    FORGER,
    OPERATOR_NAMESPACE,
    OperatorInstallation,
    build_example_job,
    has_condition,
)

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
RawBody = dict[str, Any]

UP = "../../../../../../.."
UIDS = tuple(f"abcd{number}" for number in range(6))
OBSERVED_SECONDS = 8  # the operator looks for quota of deleted jobs every two seconds
CONTAINER = {
    "name": names.CONTAINER,
    "image": "localhost/pause:1",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
POD_SPEC = {
    "automountServiceAccountToken": False,
    "schedulingGates": [{"name": "example.com/never"}],
    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [CONTAINER],
}


def build_pod(name: str, owner: RawBody, **labels: str) -> RawBody:
    """Return a pod that Kueue's finalizer keeps, with an owner of the attacker's choice."""
    metadata = {
        "name": name,
        "labels": {names.JOB_UID: owner["uid"], **labels},
        "finalizers": [names.KUEUE_FINALIZER],
        "ownerReferences": [{"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "controller": True, **owner}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": POD_SPEC}


def apply_as_editor(deployment: OperatorInstallation, *objects: RawBody) -> None:
    """Create the objects as a user who has the role edit in the namespace of the test, and no other right."""
    deployment.kubectl("apply", "--server-side", f"--as={FORGER}", "-f", "-", stdin=yaml.safe_dump_all(objects))


@pytest.fixture
def editor(deployment: OperatorInstallation) -> Iterator[None]:
    deployment.kubectl("create", "rolebinding", "editor", "--clusterrole=edit", f"--user={FORGER}")
    yield
    deployment.kubectl("delete", "rolebinding", "editor")


@pytest.fixture
def victim(deployment: OperatorInstallation) -> Iterator[str]:
    """Create a namespace with objects whose deletion the attack aims at."""
    namespace = f"victim-{secrets.token_hex(3)}"
    deployment.kubectl("create", "namespace", namespace)
    for uid in UIDS[:3]:
        deployment.kubectl("create", "service", "clusterip", f"dns-{uid}", "--tcp=53", "--namespace", namespace)
        deployment.kubectl("create", "configmap", f"settings-{uid}", "--namespace", namespace)
    yield namespace
    deployment.kubectl("delete", "namespace", namespace, "--wait=false")


def read_operator_requests(deployment: OperatorInstallation, since: str) -> list[RawBody]:
    """Return the audit records of the operator's requests for named objects."""
    assert isinstance(deployment.provider, ThrowawayProvider)
    lines = (deployment.provider.cluster.layout.root / "audit.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if '"name"' in line]
    return [each for each in records if each["requestReceivedTimestamp"] >= since and each["objectRef"].get("name")]


def list_objects(deployment: OperatorInstallation, namespace: str) -> list[str]:
    return deployment.kubectl("get", "service,configmap", "--namespace", namespace, "-o", "name").split()


def list_operator_pods(deployment: OperatorInstallation) -> dict[str, int]:
    pods = json.loads(deployment.kubectl("get", "pods", "--namespace", OPERATOR_NAMESPACE, "-o", "json"))["items"]
    return {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}


@pytest.mark.usefixtures("editor")
def test_pods_with_hostile_owners_reach_nothing_outside_of_their_namespace(
    deployment: OperatorInstallation, victim: str
) -> None:
    """The user has the role edit. The policy for children permits him all, so that only the operator's checks count."""
    since, operators = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()), list_operator_pods(deployment)
    objects = list_objects(deployment, victim)
    # the operator appends a part of the uid to the name of an owner
    owner_names = [
        f"{UP}/api/v1/namespaces/{victim}/services/dns",
        f"{UP}/api/v1/namespaces/{victim}/configmaps/settings",
        f"{UP}/api/v1/namespaces/{victim}/services/dns",
        f"{UP}/version?x=",
        f"../../{victim}/services/dns",
        "..",
    ]
    kinds = (("v1", "ConfigMap"), (names.API_VERSION, "FineTuneJob"))
    pods = []
    for number, (owner_name, uid) in enumerate(zip(owner_names, UIDS, strict=True)):
        version, kind = kinds[number % 2]
        owner = {"apiVersion": version, "kind": kind, "name": owner_name, "uid": uid}
        pods.append(build_pod(f"{number}-0", owner))  # the name of a node, after any name of an owner
    apply_as_editor(deployment, *pods)
    pod_names = [pod["metadata"]["name"] for pod in pods]
    deployment.kubectl("delete", "pod", *pod_names, "--wait=false")
    try:
        time.sleep(OBSERVED_SECONDS)
        if isinstance(deployment.provider, ThrowawayProvider):
            for request in read_operator_requests(deployment, since):
                assert ".." not in request["requestURI"], request
                assert request["objectRef"].get("namespace") not in (victim, "kube-system"), request
        assert list_operator_pods(deployment) == operators
        assert list_objects(deployment, victim) == objects
        hostile_claim = {"persistentVolumeClaim": {"claimName": f"../../{victim}/services/dns-{UIDS[0]}"}}
        job = build_example_job("hostile", volumes=[{"name": "data", "mountPath": "/data", **hostile_claim}])
        with pytest.raises(RuntimeError, match="claimName"):
            apply_as_editor(deployment, job)
    finally:
        patch = '{"metadata":{"finalizers":null}}'
        for name in pod_names:
            deployment.kubectl("patch", "pod", name, "--type=merge", "-p", patch)


def test_copies_of_the_pods_of_a_job_neither_end_nor_fail_it(deployment: OperatorInstallation, job_name: str) -> None:
    """The job waits for a label that no Kubernetes node has; a copy of another node fails."""
    fields = {"command": {"exec": ["sleep", "600"]}, "podTemplate": {"nodeSelector": {"never": "true"}}}
    removed = dict.fromkeys(("model", "dataset", "sft", "lora", "training", "output", "volumes"))
    image = get_image_name("operator")
    deployment.apply(build_example_job(job_name, **{**removed, "image": image, "nprocPerNode": 1, **fields}))
    try:
        job = deployment.wait_until(
            job_name,
            lambda body: (body.get("status", {}).get("waiting") or {}).get("reason") == "Unschedulable",
            description="unschedulable",
        )
        owner = {"name": job_name, "uid": job["metadata"]["uid"]}
        labels = {names.ATTEMPT: "0", names.NODE_RANK: "7"}
        copy = build_pod(f"{job_name}-0-7", owner, **labels)
        del copy["metadata"]["finalizers"], copy["spec"]
        container = {**CONTAINER, "command": ["/no-such-program"]}
        spec = {field: value for field, value in POD_SPEC.items() if field != "schedulingGates"}
        deployment.apply({**copy, "spec": {**spec, "restartPolicy": "Never", "containers": [container]}}, user=FORGER)
        deployment.kubectl("wait", "--for=jsonpath={.status.phase}=Failed", f"pod/{job_name}-0-7", "--timeout=60s")
        time.sleep(2)
        status = deployment.get_job(job_name)["status"]
        assert (status["attempt"], status.get("restarts", 0), status["phase"]) == (0, 0, "Queued"), status
        assert "completionTime" not in status
    finally:
        deployment.delete(job_name)


@pytest.mark.parametrize("user", ["", "somebody"], ids=["administrator", "pod author"])
def test_only_the_operator_makes_children_of_jobs(deployment: OperatorInstallation, job_name: str, user: str) -> None:
    """An administrator and a pod author are refused; objects that only carry the name of a job are accepted."""
    as_user = (f"--as={user}", "--as-group=system:masters") if user else ()
    label = f"{names.JOB_UID}=abcde"
    deployment.kubectl("create", "configmap", job_name)
    try:
        with pytest.raises(RuntimeError, match="may only be set by the operator"):
            deployment.kubectl("label", "configmap", job_name, label, *as_user)
        deployment.kubectl("label", "configmap", job_name, f"{names.JOB_NAME}=x", *as_user)
        owner = {"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "name": "x", "uid": "abcde"}
        for controller, is_accepted in ((False, True), (True, False)):
            patch = json.dumps({"metadata": {"ownerReferences": [{**owner, "controller": controller}]}})
            command = ("patch", "configmap", job_name, "--type=merge", "--dry-run=server", "-p", patch, *as_user)
            if is_accepted:
                deployment.kubectl(*command)
            else:
                with pytest.raises(RuntimeError, match="a controller of kind FineTuneJob"):
                    deployment.kubectl(*command)
    finally:
        deployment.kubectl("delete", "configmap", job_name)


def test_an_administrator_annotates_debugs_and_deletes_a_pod_of_a_job(
    deployment: OperatorInstallation, start_program: Callable[..., str]
) -> None:
    """The policy for children refuses an administrator only changes of the reserved labels."""
    name = start_program("sleep 600")
    deployment.wait_until(name, lambda job: has_condition(job, "Running"), description="running")
    pod, image = names.pod_name(name, 0, 0), ("--image=localhost/pause:1", "--image-pull-policy=Never")
    deployment.kubectl("annotate", "pod", pod, "example.com/note=seen")
    deployment.kubectl("label", "pod", pod, "example.com/team=a")
    deployment.kubectl("debug", pod, *image, f"--target={names.CONTAINER}", "--profile=restricted")
    deployment.kubectl("debug", pod, *image, f"--copy-to={pod}-copy", "--profile=restricted")
    for label in (names.ATTEMPT, names.NODE_RANK):
        with pytest.raises(RuntimeError, match="may only be set by the operator"):
            deployment.kubectl("label", "pod", pod, "--overwrite", f"{label}=7")
    deployment.kubectl("delete", "pod", f"{pod}-copy", pod, "--grace-period=1")
    deployment.wait_until(
        name, lambda job: job["status"]["attempt"] == 1 and has_condition(job, "Running"), description="running again"
    )


def test_the_operator_of_another_release_makes_children(deployment: OperatorInstallation, job_name: str) -> None:
    """The installed policy recognises an operator by the right to update the status of jobs, in that namespace only."""
    account = f"system:serviceaccount:{deployment.namespace}:{job_name}"
    create_only = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]}
    update_status = {"apiGroups": ["finetune.dev"], "resources": ["finetunejobs/status"], "verbs": ["update"]}
    metadata = {"name": job_name, "labels": {names.JOB_UID: "abcde"}}
    child = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    try:
        deployment.apply(*build_role(job_name, account, create_only))
        wait_for_response(deployment, child, account, "may only be set by the operator")
        deployment.apply(*build_role(job_name, account, create_only, update_status))
        wait_for_response(deployment, child, account, f"configmap/{job_name}")
    finally:
        deployment.kubectl("delete", "role,rolebinding", job_name, "--ignore-not-found")


def build_role(name: str, account: str, *rules: RawBody) -> tuple[RawBody, RawBody]:
    """Return a Role and its binding to an account, as a release with `watchNamespaces` contains them."""
    group = "rbac.authorization.k8s.io"
    body = {"apiVersion": f"{group}/v1", "metadata": {"name": name}}
    subjects = [{"kind": "User", "apiGroup": group, "name": account}]
    reference = {"apiGroup": group, "kind": "Role", "name": name}
    binding = {**body, "kind": "RoleBinding", "roleRef": reference, "subjects": subjects}
    return {**body, "kind": "Role", "rules": list(rules)}, binding


def wait_for_response(deployment: OperatorInstallation, body: RawBody, account: str, expected: str) -> None:
    """Wait until the API server knows the roles and responds to a create with the expected text."""
    deadline = time.monotonic() + 20
    command = ("create", "--dry-run=server", f"--as={account}", "-o", "name", "-f", "-")
    while True:
        try:
            response = deployment.kubectl(*command, stdin=json.dumps(body))
        except RuntimeError as error:
            response = str(error)
        if expected in response:
            return
        assert time.monotonic() < deadline, response
        time.sleep(0.2)
