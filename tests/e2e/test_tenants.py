"""Tests that objects of another tenant in the namespace of a job do not affect the job."""

import base64
import json
import time
from collections.abc import Callable

import pytest

from finetune_operator import names
from testing.builders.jobs import command
from testing.cluster.fault_injection import Chaos
from testing.cluster.images.project_images import get_image_name
from testing.faults.foreign_objects import build_decoy_pod, build_forged_config_map
from testing.faults.job_under_test import JobUnderTest
from testing.faults.training_job import read_first_step, request_finish, wait_for_save
from testing.processes.cluster_training import build_training_fields, wait_for_checkpoint
from testing.processes.operator_stack import FORGER, OperatorInstallation, RawBody, get_reported_step, has_condition

pytestmark = [pytest.mark.cluster, pytest.mark.versions]
StartJob = Callable[..., str]


@pytest.mark.long("observes a poller for half a minute; unit and simulation cover it")
def test_progress_of_a_pod_with_the_labels_of_the_job_is_ignored(
    deployment: OperatorInstallation, start_job: StartJob
) -> None:
    job = start_job(training=build_training_fields(max_steps=400, save_steps=20))
    wait_for_checkpoint(deployment, job)
    decoy = build_decoy_pod(deployment.get_job(job))
    deployment.apply(decoy, user=FORGER)
    try:
        deployment.kubectl("wait", "--for=condition=Ready", f"pod/{decoy['metadata']['name']}", "--timeout=60s")
        until = time.monotonic() + 25  # more than two intervals of the progress poller
        while time.monotonic() < until:
            body = deployment.get_job(job)
            assert get_reported_step(body) <= 400
            assert not any((record.get("lastStep") or 0) > 400 for record in body["status"]["attempts"])
            time.sleep(1)
    finally:
        deployment.kubectl("delete", "pod", decoy["metadata"]["name"], "--ignore-not-found")

    finished = deployment.wait_until_finished(job)
    assert has_condition(finished, "Complete")
    assert (finished["status"]["progress"]["step"], finished["status"].get("restarts", 0)) == (400, 0)


def test_config_map_with_a_forged_owner_reference_is_replaced(
    deployment: OperatorInstallation, fault_injector: Chaos, start_training_program: Callable[[], str]
) -> None:
    job = start_training_program()
    saved = wait_for_save(deployment, job)
    under_test = JobUnderTest(deployment, fault_injector, job)
    name = under_test.get_config_map_name(attempt=1)
    genuine = json.loads(
        deployment.kubectl("get", "configmap", under_test.get_config_map_name(attempt=0), "-o", "json")
    )
    forged = json.dumps({**json.loads(genuine["data"][names.CONFIG_KEY]), "command": {"exec": ["true"]}})
    deployment.apply(build_forged_config_map(genuine, name, **{names.CONFIG_KEY: forged}), user=FORGER)
    under_test.kill_container(1)
    deployment.wait_until(job, lambda body: body["status"]["attempt"] == 1, description="restarted")
    request_finish(deployment, job)

    finished = deployment.wait_until_finished(job)
    config_map = json.loads(deployment.kubectl("get", "configmap", name, "-o", "json"))
    assert has_condition(finished, "Complete"), finished["status"]["conditions"]
    killed, _ = finished["status"]["attempts"]
    assert (killed["reason"], killed["nodeRank"]) == ("ContainerKilled", 1), killed
    assert read_first_step(deployment, f"{job}-1-0") > saved > 0
    assert config_map["data"] == genuine["data"]


THEIR_PROGRAM = """
import os, pathlib
folder = pathlib.Path(os.environ["FINETUNE_OUTPUT"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "theirs").write_text(os.environ["NODE_RANK"])
"""
OUR_PROGRAM = 'mkdir -p "$FINETUNE_OUTPUT" && touch "$FINETUNE_OUTPUT/ours"'
THEIR_CONFIG = json.dumps({"command": {"exec": ["python3", "-c", THEIR_PROGRAM]}})


@pytest.mark.parametrize(
    ("fields", "key", "their_data"),
    [
        pytest.param(
            command({"exec": ["sh", "-c", OUR_PROGRAM]}, image=get_image_name("operator"), nprocPerNode=1),
            names.SUPERVISOR_KEY,
            {"binaryData": {names.SUPERVISOR_KEY: base64.b64encode(THEIR_PROGRAM.encode()).decode()}},
            id="command",
        ),
        pytest.param(
            {"training": build_training_fields(max_steps=4)},
            names.CONFIG_KEY,
            {"data": {names.CONFIG_KEY: THEIR_CONFIG}},
            id="trainer",
        ),
    ],
)
def test_config_map_that_was_recreated_with_another_program_is_not_used(
    deployment: OperatorInstallation, start_job: StartJob, job_name: str, fields: RawBody, key: str, their_data: RawBody
) -> None:
    # the pods wait for a label that no Kubernetes node has
    label = f"wait-for-test/{job_name}"
    job = start_job(numNodes=1, podTemplate={"nodeSelector": {label: "true"}}, **fields)
    deployment.wait_until(
        job,
        lambda body: (body.get("status", {}).get("waiting") or {}).get("reason") == "Unschedulable",
        description="unschedulable",
    )
    uid = deployment.get_job(job)["metadata"]["uid"]
    name = names.config_map_name(job, uid, 0)
    genuine = json.loads(deployment.kubectl("get", "configmap", name, "-o", "json"))
    metadata = {field: genuine["metadata"][field] for field in ("name", "labels", "ownerReferences")}
    deployment.kubectl("delete", "configmap", name)
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, **their_data}
    deployment.apply(theirs, user=FORGER)
    deployment.kubectl("label", "nodes", "--all", f"{label}=true")
    try:
        finished = deployment.wait_until_finished(job)
    finally:
        deployment.kubectl("label", "nodes", "--all", f"{label}-")

    assert has_condition(finished, "Complete"), finished["status"]["conditions"]
    first, last = finished["status"]["attempts"]
    assert (first["reason"], first["fault"], first["action"]) == ("ConfigMapReplaced", "infrastructure", "Restart")
    assert f"ConfigMap {name}, key {key}: expected SHA-256 " in first["message"]
    assert last["state"] == "Succeeded"
    output = deployment.get_output_folder(job)
    assert any((output / file).exists() for file in ("ours", "result/SUCCESS"))
    assert not (output / "theirs").exists()


def test_kubectl_wait_returns_after_a_finished_job_was_changed(
    deployment: OperatorInstallation, start_program: StartJob
) -> None:
    job = start_program("true", numNodes=1)
    deployment.wait_until_finished(job)
    deployment.kubectl("patch", "ftj", job, "--type=merge", "-p", '{"spec":{"ttlSecondsAfterFinished":3600}}')

    deployment.kubectl("wait", "--for=condition=Complete", f"ftj/{job}", "--timeout=60s")
