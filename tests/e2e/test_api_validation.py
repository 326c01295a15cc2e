"""Tests of the CRD on a real API server: validation, immutability, server-side apply, explain and printer columns."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.jobs import spec
from testing.processes.operator_stack import OperatorInstallation

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
RawBody = dict[str, Any]

EXAMPLES = sorted((Path(__file__).parents[2] / "manifests" / "examples").glob("*.yaml"))
SECRET = {"secretKeyRef": {"name": "hub", "key": "token"}}


def build_job(name: str, **fields: Any) -> RawBody:
    """Build a suspended job, which the operator does not start; None removes a field."""
    job_spec = spec(**{"suspend": True, **fields})
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name},
        "spec": {key: value for key, value in job_spec.items() if value is not None},
    }


def get_rejection_message(call: Callable[..., object], *arguments: Any) -> str:
    """Return the API server's error message for a rejected call."""
    with pytest.raises(RuntimeError) as error:
        call(*arguments)
    return str(error.value)


def apply_dry_run(deployment: OperatorInstallation, job: RawBody) -> None:
    """Send the request of `kubectl apply --server-side --dry-run=server`."""
    path = f"/apis/finetune.dev/v1alpha1/namespaces/{deployment.namespace}/finetunejobs/{job['metadata']['name']}"
    options = "dryRun=All&fieldManager=test&fieldValidation=Strict"
    deployment.api.send("PATCH", f"{path}?{options}", job, content_type="application/apply-patch+yaml")


@pytest.fixture
def job(deployment: OperatorInstallation, job_name: str) -> Iterator[RawBody]:
    """Apply an unschedulable job whose spec can be patched."""
    applied = build_job(
        job_name,
        suspend=False,
        env=[{"name": "HF_TOKEN", "valueFrom": SECRET}],
        podTemplate={"schedulerName": "nobody", "securityContext": {"runAsUser": 1000}},
    )
    deployment.apply(applied)
    yield applied
    deployment.delete(job_name)


def patch_job(deployment: OperatorInstallation, job: RawBody, fields: RawBody) -> str:
    change = yaml.safe_dump({"spec": fields})
    return deployment.kubectl("patch", "ftj", job["metadata"]["name"], "--type=merge", f"--patch={change}")


@pytest.mark.parametrize("bad_job_name", BAD_JOBS)
def test_invalid_job_is_rejected_if_cel_can_check_it(deployment: OperatorInstallation, bad_job_name: str) -> None:
    job, expected = build_job("bad", **BAD_JOBS[bad_job_name].fields), BAD_JOBS[bad_job_name].api_server_error
    if expected is None:
        apply_dry_run(deployment, job)
    else:
        assert expected in get_rejection_message(apply_dry_run, deployment, job)


def test_valid_job_is_accepted(deployment: OperatorInstallation) -> None:
    apply_dry_run(deployment, build_job("good"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "a" * 53, "at most 52 characters, so that the names of its pods fit 63; this one has 53", id="long"
        ),
        pytest.param("7b-lora", "must start with a lower case letter", id="starts with a digit"),
        pytest.param("qwen2.5", "contain only a-z, 0-9 and '-'", id="contains a dot"),
    ],
)
def test_job_name_that_is_not_a_valid_service_name_is_rejected(
    deployment: OperatorInstallation, name: str, message: str
) -> None:
    assert message in get_rejection_message(apply_dry_run, deployment, build_job(name))
    apply_dry_run(deployment, build_job("a" * 52))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_accepted(deployment: OperatorInstallation, path: Path) -> None:
    apply_dry_run(deployment, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"model": {"name": "/data/other"}}, "spec.model is immutable; delete and recreate", id="changed"),
        pytest.param({"training": {"seed": 1}}, "spec.training is immutable", id="added"),
        pytest.param({"lora": None}, "spec.lora is immutable", id="removed"),
        pytest.param(
            {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "other"}}}]},
            "spec.env is immutable",
            id="nested pod field",
        ),
        pytest.param(
            {"env": [{"name": "HF_TOKEN", "valueFrom": {"configMapKeyRef": {"name": "hub", "key": "token"}}}]},
            "spec.env is immutable",
            id="replaced key of a pod field",
        ),
        pytest.param(
            {"podTemplate": {"securityContext": {"runAsUser": None, "runAsGroup": 1000}}},
            "only while the job is suspended",
            id="replaced key of the pod template",
        ),
        pytest.param({"image": "other"}, "only while the job is suspended; set spec.suspend to true", id="image"),
        pytest.param(
            {"podTemplate": {"securityContext": {"runAsUser": 0}}}, "only while the job is suspended", id="pod template"
        ),
        pytest.param(
            {"suspend": True, "image": "other"}, "only while the job is suspended", id="suspended in the same patch"
        ),
    ],
)
def test_changes_to_immutable_fields_are_rejected(
    deployment: OperatorInstallation, job: RawBody, fields: RawBody, message: str
) -> None:
    assert message in get_rejection_message(patch_job, deployment, job, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"podTemplate": {"affinity": {"nodeAfinity": {}}}},
            ".affinity.nodeAfinity: field not declared in schema",
            id="misspelled",
        ),
        pytest.param(
            {"podTemplate": {"securityContext": {"runAsUser": "root"}}}, "runAsUser: expected numeric", id="wrong type"
        ),
        pytest.param(
            {"podTemplate": {"containerSecurityContext": {"capabilities": {"add": ["A"] * 65}}}},
            "at most 64 items",
            id="long list",
        ),
        pytest.param(
            {"env": [{"name": f"A{number}", "value": "x" * 32768} for number in range(3)]},
            "at most 65536 characters",
            id="large environment",
        ),
        pytest.param(
            {"deepspeed": {"config": {f"key{number}": 1 for number in range(65)}}}, "at most 64 items", id="many keys"
        ),
    ],
)
def test_kubernetes_objects_are_validated_and_bounded(
    deployment: OperatorInstallation, fields: RawBody, message: str
) -> None:
    assert message in get_rejection_message(apply_dry_run, deployment, build_job("bad", **fields))


VIOLATING_FIELDS: RawBody = {
    "env": [{"name": f"A{number}", "value": "x" * 32768} for number in range(3)],
    "podTemplate": {"affinity": {"nodeAffinity": "none", "invented": {"a": 1}}},
}


def replace_crd(deployment: OperatorInstallation, crd: RawBody, *, is_permissive: bool) -> None:
    """Replace the CRD and wait until the API server serves it."""
    deployment.kubectl("replace", "-f", "-", stdin=json.dumps(crd))
    deadline = time.monotonic() + 60
    while accepts_violating_fields(deployment) != is_permissive:
        assert time.monotonic() < deadline, "the API server does not serve the changed CRD"
        time.sleep(0.5)


def accepts_violating_fields(deployment: OperatorInstallation) -> bool:
    try:
        create = ("create", "--dry-run=server", "--validate=false", "-f", "-")
        deployment.kubectl(*create, stdin=json.dumps(build_job("probe", **VIOLATING_FIELDS)))
    except RuntimeError:
        return False
    return True


@pytest.fixture
def permissive_crd(deployment: OperatorInstallation) -> Iterator[Callable[[], None]]:
    """Replace the CRD by one without the bounds of env and affinity; return a function that restores it."""
    name = "finetunejobs.finetune.dev"
    crd = json.loads(deployment.kubectl("get", "crd", name, "-o", "json"))
    metadata = {key: crd["metadata"][key] for key in ("name", "labels", "annotations") if key in crd["metadata"]}
    strict_crd = {"apiVersion": crd["apiVersion"], "kind": crd["kind"], "metadata": metadata, "spec": crd["spec"]}
    permissive = copy.deepcopy(strict_crd)
    properties = permissive["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del properties["env"]["x-kubernetes-validations"]
    properties["podTemplate"]["properties"]["affinity"] = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    }

    replace_crd(deployment, permissive, is_permissive=True)
    yield lambda: replace_crd(deployment, strict_crd, is_permissive=False)
    replace_crd(deployment, strict_crd, is_permissive=False)


@pytest.mark.alone
def test_stored_job_that_violates_a_newer_schema_keeps_working(
    deployment: OperatorInstallation, job_name: str, permissive_crd: Callable[[], None]
) -> None:
    job = build_job(job_name, **VIOLATING_FIELDS)
    try:
        deployment.kubectl("create", "--validate=false", "-f", "-", stdin=json.dumps(job))
        permissive_crd()
        patch_job(deployment, job, {"ttlSecondsAfterFinished": 600})
        deployment.kubectl("wait", f"ftj/{job_name}", "--for=jsonpath={.status.observedGeneration}=2", "--timeout=60s")
        stored = deployment.get_job(job_name)
    finally:
        deployment.delete(job_name)

    assert stored["status"]["phase"] == "Suspended"
    assert stored["spec"]["podTemplate"]["affinity"] == {"nodeAffinity": "none"}, "unknown fields are pruned"


def test_disruption_budget_with_max_unavailable_counts_the_nodes_of_the_job(
    deployment: OperatorInstallation, job_name: str
) -> None:
    deployment.apply(build_job(job_name, suspend=False, podTemplate={"schedulerName": "nobody"}))
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": job_name},
        "spec": {"maxUnavailable": "50%", "selector": {"matchLabels": {"finetune.dev/job-name": job_name}}},
    }
    try:
        deployment.kubectl("wait", f"ftj/{job_name}", "--for=jsonpath={.status.replicas}=2", "--timeout=60s")
        deployment.apply(budget)
        # the disruption controller may have discovered the CRD's resources up to 30 s before their creation, and it
        # retries only after a change of the budget or a pod
        for number in range(50):
            deployment.kubectl("annotate", "pdb", job_name, f"retry={number}", "--overwrite")
            time.sleep(1)
            status = json.loads(deployment.kubectl("get", "pdb", job_name, "-o", "json"))["status"]
            if status["expectedPods"] == 2:
                break
        assert status["expectedPods"] == 2, status
        scale = json.loads(deployment.kubectl("get", "ftj", job_name, "--subresource=scale", "-o", "json"))
        uid = deployment.get_job(job_name)["metadata"]["uid"]
    finally:
        deployment.kubectl("delete", "pdb", job_name, "--ignore-not-found")
        deployment.delete(job_name)

    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {
        "replicas": 2,
        "selector": f"finetune.dev/job-uid={uid},finetune.dev/attempt=0",
    }


def test_job_cannot_be_scaled(deployment: OperatorInstallation, job: RawBody) -> None:
    name = job["metadata"]["name"]

    message = get_rejection_message(deployment.kubectl, "scale", f"ftj/{name}", "--replicas=3")

    assert "spec.numNodes can be changed only while the job is suspended" in message


def test_a_job_without_global_batch_size_cannot_be_resized(deployment: OperatorInstallation, job_name: str) -> None:
    training = {"perDeviceTrainBatchSize": 2, "maxSteps": 1}
    try:
        deployment.apply(build_job(job_name, suspend=True, training=training))
        message = get_rejection_message(deployment.kubectl, "scale", f"ftj/{job_name}", "--replicas=3")
    finally:
        deployment.delete(job_name)

    assert "can be changed only in a job with training.globalBatchSize" in message


def test_job_without_num_nodes_has_a_scale(deployment: OperatorInstallation, job_name: str) -> None:
    try:
        deployment.apply(build_job(job_name, numNodes=None))
        scale = json.loads(deployment.kubectl("get", "ftj", job_name, "--subresource=scale", "-o", "json"))
        deployment.apply(build_job(job_name, numNodes=1))
    finally:
        deployment.delete(job_name)

    assert scale["spec"] == {"replicas": 1}


@pytest.mark.alone
def test_new_job_is_in_progress_before_the_first_status_write(deployment: OperatorInstallation, job_name: str) -> None:
    namespace, name = "finetune-system", "deployment/finetune-operator"
    replicas = deployment.kubectl("get", "-n", namespace, name, "-o", "jsonpath={.spec.replicas}")
    try:
        deployment.kubectl("scale", "-n", namespace, name, "--replicas=0")
        deployment.kubectl(
            *("wait", "-n", namespace, "--for=delete", "pods", "-l", "app.kubernetes.io/name=finetune-operator"),
            "--timeout=90s",
        )
        deployment.apply(build_job(job_name))
        status = deployment.get_job(job_name)["status"]
    finally:
        deployment.kubectl("scale", "-n", namespace, name, f"--replicas={replicas}")
        deployment.kubectl("rollout", "status", "-n", namespace, name, "--timeout=120s")
    assert status == {"observedGeneration": -1}

    try:
        deployment.kubectl("wait", f"ftj/{job_name}", "--for=jsonpath={.status.phase}=Suspended", "--timeout=60s")
    finally:
        deployment.delete(job_name)


def test_mutable_fields_can_be_changed(deployment: OperatorInstallation, job: RawBody) -> None:
    patch_job(
        deployment,
        job,
        {"ttlSecondsAfterFinished": 5, "activeDeadlineSeconds": 60, "restartPolicy": {"maxRestarts": 1}},
    )
    patch_job(deployment, job, {"suspend": True})
    patch_job(
        deployment,
        job,
        {"image": "other", "resources": {"limits": {"memory": "8Gi"}}, "network": {"masterPort": 29501}},
    )
    assert "spec.model is immutable" in get_rejection_message(
        patch_job, deployment, job, {"model": {"name": "/data/other"}}
    )
    patch_job(deployment, job, {"suspend": False, "podTemplate": {"schedulerName": "another"}})

    assert deployment.get_job(job["metadata"]["name"])["spec"]["image"] == "other"


def test_second_apply_of_the_same_job_changes_nothing(deployment: OperatorInstallation, job_name: str) -> None:
    job = build_job(job_name)
    try:
        deployment.apply(job)
        before = deployment.get_job(job_name)
        deployment.apply(job)
        after = deployment.get_job(job_name)
    finally:
        deployment.delete(job_name)

    assert after["spec"] == before["spec"] == job["spec"], "the API server adds no default except numNodes"
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1


def test_two_field_managers_can_own_different_items_of_a_list(deployment: OperatorInstallation, job_name: str) -> None:
    first, second = build_job(job_name), build_job(job_name)
    first["spec"]["imagePullSecrets"] = [{"name": "first"}]
    second["spec"]["imagePullSecrets"] = [{"name": "second"}]
    apply = ("apply", "--server-side", "-f", "-")
    try:
        deployment.kubectl(*apply, "--field-manager=one", stdin=yaml.safe_dump(first))
        deployment.kubectl(*apply, "--field-manager=two", stdin=yaml.safe_dump(second))
        secrets = deployment.get_job(job_name)["spec"]["imagePullSecrets"]
    finally:
        deployment.delete(job_name)

    assert sorted(secret["name"] for secret in secrets) == ["first", "second"]


def test_kubectl_explain_shows_descriptions_defaults_and_enums(deployment: OperatorInstallation) -> None:
    explanation = deployment.kubectl("explain", "ftj.spec.training")

    assert "Names are those of\n    transformers.TrainingArguments." in explanation
    assert "learningRate\t<number>\n    Peak learning rate (default: 1e-4 with lora, 1e-5 without" in explanation
    assert "enum: linear, cosine, constant" in explanation
    assert "<>" not in explanation


def test_kubectl_get_accepts_the_category_and_shows_all_columns(deployment: OperatorInstallation, job: RawBody) -> None:
    header, *rows = deployment.kubectl("get", "finetune").splitlines()

    assert header.split() == ["NAME", "PHASE", "NODES", "PROGRESS", "LOSS", "TOKENS/S", "ETA", "RESTARTS", "AGE"]
    assert any(row.startswith(job["metadata"]["name"]) for row in rows)
