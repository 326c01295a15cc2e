"""Tests of invalid input that only the operator or the trainer can detect."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from testing.processes.cluster_training import build_training_fields
from testing.processes.operator_stack import (
    OPERATOR_NAMESPACE,
    OperatorInstallation,
    RawBody,
    build_example_job,
    has_condition,
)

pytestmark = pytest.mark.cluster
StartJob = Callable[..., str]


def get_failure_message(job: RawBody) -> str:
    failed = next(c for c in job["status"]["conditions"] if c["type"] == "Failed")
    return f"{failed['reason']}: {failed['message']}"


@pytest.mark.versions
def test_read_write_once_claim_is_rejected_for_two_nodes(deployment: OperatorInstallation, start_job: StartJob) -> None:
    claim: RawBody = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "one-node"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    deployment.apply(claim)
    finished = deployment.wait_until_finished(start_job(output={"persistentVolumeClaim": {"claimName": "one-node"}}))
    assert "one-node is ReadWriteOnce, but 2 nodes mount it: it must be ReadWriteMany" in get_failure_message(finished)
    assert deployment.list_pods(finished["metadata"]["name"]) == []


def test_output_of_another_job_is_not_overwritten(
    deployment: OperatorInstallation, start_job: StartJob, job_name: str
) -> None:
    folder = deployment.get_output_folder(job_name)
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "job.json").write_text('{"uid": "somebody-else", "namespace": "x", "name": "theirs"}')
    try:
        finished = deployment.wait_until_finished(start_job(numNodes=1, training=build_training_fields(max_steps=4)))
        message = get_failure_message(finished)
        assert message.startswith("OutputError: ")
        assert "output.overwrite" in message
        assert (folder / "job.json").read_text().startswith('{"uid": "somebody-else"')
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def count_operator_restarts(deployment: OperatorInstallation) -> list[int]:
    selector = "app.kubernetes.io/name=finetune-operator"
    pods = json.loads(deployment.kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, "-l", selector, "-o", "json"))
    return [status["restartCount"] for pod in pods["items"] for status in pod["status"]["containerStatuses"]]


@pytest.mark.versions
def test_deeply_nested_job_does_not_stop_the_operator(
    deployment: OperatorInstallation, start_program: StartJob, job_name: str
) -> None:
    """A field without a schema may have up to 10,000 levels; each LIST and watch event contains them."""
    body = build_example_job(f"{job_name}-deep", suspend=True, deepspeed={"config": {"nested": "NESTED"}})
    levels = 9_000
    restarts = count_operator_restarts(deployment)
    deployment.kubectl(
        "create",
        "-f",
        "-",
        stdin=json.dumps(body).replace('"NESTED"', '{"a":' * levels + "1" + "}" * levels),
    )
    try:
        deployment.kubectl("wait", "--for=condition=Suspended", f"ftj/{job_name}-deep", "--timeout=60s")
        finished = deployment.wait_until_finished(start_program("true"))
        restarts_afterwards = count_operator_restarts(deployment)
    finally:
        deployment.delete(f"{job_name}-deep")

    assert has_condition(finished, "Complete"), finished["status"]
    assert restarts_afterwards == restarts
    assert len(restarts) == 2


PENDING_CASES: dict[str, tuple[RawBody, str, str]] = {
    "missing image": ({"image": "registry.invalid/nobody/nothing:v0"}, "ImagePullFailed", "spec.image"),
    "too many cores": ({"resources": {"requests": {"cpu": "400"}}}, "Unschedulable", "Insufficient cpu"),
}


@pytest.mark.parametrize("pending_case", PENDING_CASES)
def test_pending_pods_are_reported_without_failing_the_job(
    deployment: OperatorInstallation, start_job: StartJob, pending_case: str
) -> None:
    fields, reason, text = PENDING_CASES[pending_case]
    fields = {**fields, "imagePullPolicy": "IfNotPresent"} if "image" in fields else fields

    def is_reason_reported(job: RawBody) -> Any:
        waiting = job.get("status", {}).get("waiting") or {}
        return waiting.get("reason") == reason and text in waiting["message"]

    job = deployment.wait_until(start_job(**fields), is_reason_reported, description=f"waiting for {reason}")
    running = next(c for c in job["status"]["conditions"] if c["type"] == "Running")
    assert (running["status"], running["reason"]) == ("False", reason)
    assert not has_condition(job, "Finished")
    assert len(job["status"]["attempts"]) == 1
