"""Tests of suspend, resume, deadlines, TTL and deletion on a real cluster."""

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testing.faults.training_job import wait_for_save
from testing.models.loss_curve import read_losses
from testing.processes.cluster_training import (
    build_training_fields,
    find_last_checkpoint_step,
    train_in_one_process,
    wait_for_checkpoint,
)
from testing.processes.operator_stack import OperatorInstallation, has_condition

pytestmark = pytest.mark.cluster
StartJob = Callable[..., str]
LABEL = "finetune.dev/job-name"

# Ignores SIGTERM until a file exists, so that a test decides how long the pods of a deleted job run.
RUN_UNTIL_FILE_EXISTS = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
output = pathlib.Path(os.environ["FINETUNE_OUTPUT"])
(output / f"node-{os.environ['NODE_RANK']}").touch()
while not (output / "end").exists():
    time.sleep(0.2)
"""


@pytest.mark.versions
def test_resumed_job_continues_from_the_checkpoint_saved_on_suspend(
    deployment: OperatorInstallation, start_job: StartJob
) -> None:
    job = start_job(training=build_training_fields(max_steps=80, save_steps=20))
    wait_for_checkpoint(deployment, job)

    deployment.kubectl("patch", "ftj", job, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    suspended = deployment.wait_until(job, lambda j: has_condition(j, "Suspended"), description="Suspended")

    assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in deployment.list_pods(job))
    saved = suspended["status"]["progress"]["lastCheckpoint"]
    stopped_at = suspended["status"]["attempts"][-1]["lastStep"]
    assert int(saved.removeprefix("step-")) == stopped_at < 80

    deployment.kubectl("patch", "ftj", job, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    finished = deployment.wait_until_finished(job)
    assert has_condition(finished, "Complete")
    assert finished["status"]["attempts"][-1]["firstStep"] == stopped_at
    assert finished["status"].get("restarts", 0) == 0


@pytest.mark.long("takes three minutes; integration resumes with another number of ranks")
def test_a_suspended_job_is_resumed_on_one_node_and_then_on_four_ranks(
    deployment: OperatorInstallation, start_job: StartJob, tmp_path: Path
) -> None:
    training = build_training_fields(max_steps=120, save_steps=20, learningRate=0.002)
    job = start_job(lora=None, fsdp={}, numNodes=2, nprocPerNode=1, training=training)
    saved = 0
    for num_nodes, ranks_per_node in ((1, 1), (2, 2)):
        wait_for_checkpoint(deployment, job, after=saved)
        deployment.kubectl("patch", "ftj", job, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        deployment.wait_until(job, lambda j: has_condition(j, "Suspended"), description="Suspended")
        saved = find_last_checkpoint_step(deployment, job)
        resized = {"spec": {"numNodes": num_nodes, "nprocPerNode": ranks_per_node, "suspend": False}}
        deployment.kubectl("patch", "ftj", job, "--type=merge", "-p", json.dumps(resized))
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    attempts = finished["status"]["attempts"]
    assert [attempt["numNodes"] for attempt in attempts] == [2, 1, 2]
    assert [attempt["firstStep"] for attempt in attempts[1:]] == [attempt["lastStep"] for attempt in attempts[:-1]]
    assert finished["status"]["batch"]["worldSize"] == 4
    assert finished["status"]["batch"]["effective"] == 8
    single = train_in_one_process(deployment, training, tmp_path, lora=None)
    losses = read_losses(deployment.get_output_folder(job))
    assert list(single) == list(losses) == list(range(1, 121))
    assert all(abs(single[step] - losses[step]) < 5e-4 for step in losses), (single, losses)


def test_job_created_suspended_starts_when_resumed(deployment: OperatorInstallation, start_program: StartJob) -> None:
    job = start_program("true", suspend=True)
    deployment.wait_until(job, lambda j: has_condition(j, "Suspended"), description="Suspended")
    assert deployment.list_pods(job) == []

    # the network settings are mutable while the job is suspended
    deployment.kubectl(
        "patch", "ftj", job, "--type=merge", "-p", '{"spec":{"suspend":false,"network":{"masterPort":29600}}}'
    )
    assert has_condition(deployment.wait_until_finished(job), "Complete")
    assert_events_are_shown(deployment, job, ("Running", "Completed"))


def assert_events_are_shown(deployment: OperatorInstallation, job: str, reasons: tuple[str, ...]) -> None:
    """Assert that `kubectl get events` and `kubectl describe` show each event once, with its age."""
    selector = f"involvedObject.name={job},involvedObject.kind=FineTuneJob"
    rows = [line.split() for line in deployment.kubectl("get", "events", "--field-selector", selector).splitlines()]
    described = [line.split() for line in deployment.kubectl("describe", "ftj", job).splitlines()]
    for reason in reasons:
        assert [row[1] for row in rows if row[2] == reason] == ["Normal"]
        assert [row[3] for row in described if row[:2] == ["Normal", reason]] == ["finetune.dev/finetune-operator"]
    assert all(re.fullmatch(r"([0-9]+[smh])+", row[0]) for row in rows[1:])


@pytest.mark.versions
def test_active_deadline_fails_the_job_and_stops_its_pods(
    deployment: OperatorInstallation, start_program: StartJob
) -> None:
    job = start_program("sleep 600", activeDeadlineSeconds=10)
    finished = deployment.wait_until_finished(job, timeout_seconds=120)

    assert has_condition(finished, "Failed")
    failed = next(c for c in finished["status"]["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert "activeDeadlineSeconds (10 s)" in failed["message"]
    assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in deployment.list_pods(job))


def test_cancelled_job_keeps_its_checkpoint_and_its_saved_log(
    deployment: OperatorInstallation, start_training_program: Callable[[], str]
) -> None:
    job = start_training_program()
    saved = wait_for_save(deployment, job)
    deployment.kubectl("patch", "ftj", job, "--type=merge", "-p", '{"spec":{"cancel":true}}')
    finished = deployment.wait_until_finished(job, timeout_seconds=120)

    failed = next(c for c in finished["status"]["conditions"] if c["type"] == "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "Cancelled")
    assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in deployment.list_pods(job))
    output = deployment.get_output_folder(job)
    assert wait_for_save(deployment, job) > saved, "nothing was saved before the end"
    assert (output / "logs" / "attempt-0" / "node-0.log").stat().st_size > 0


@pytest.mark.versions
def test_unschedulable_pod_stops_the_gang_and_finally_fails_the_job(
    deployment: OperatorInstallation, start_program: StartJob
) -> None:
    """The placement is contradictory: both pods require the same Kubernetes node, but must not share a node."""
    (k8s_node, *_) = json.loads(deployment.kubectl("get", "nodes", "-o", "json"))["items"]
    hostname = "kubernetes.io/hostname"
    anti_affinity = {
        "topologyKey": hostname,
        "labelSelector": {"matchExpressions": [{"key": LABEL, "operator": "Exists"}]},
    }
    template = {
        "nodeSelector": {hostname: k8s_node["metadata"]["labels"][hostname]},
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [anti_affinity]}},
    }
    job = start_program(
        "sleep 600",
        podTemplate=template,
        startupDeadlineSeconds=5,
        pendingDeadlineSeconds=30,
        restartPolicy={"maxRestarts": 0, "maxInfrastructureRestarts": 0, "maxBackoffSeconds": 5},
    )

    finished = deployment.wait_until_finished(job, timeout_seconds=120)

    first, *_, last = finished["status"]["attempts"]
    assert first["reason"] == "GangIncomplete", finished["status"]
    assert "1 of 2 pods cannot be placed" in first["message"]
    assert last["reason"] == "PendingDeadlineExceeded"
    assert "pendingDeadlineSeconds (30 s)" in last["message"]
    assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in deployment.list_pods(job))


def test_a_job_fails_if_another_service_has_its_name(
    deployment: OperatorInstallation, job_name: str, start_program: StartJob
) -> None:
    spec = {"ports": [{"port": 80}], "selector": {"app": "theirs"}}
    deployment.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": job_name}, "spec": spec})
    try:
        finished = deployment.wait_until_finished(start_program("true"))
    finally:
        deployment.kubectl("delete", "service", job_name)

    failed = next(condition for condition in finished["status"]["conditions"] if condition["type"] == "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "NameTaken"), finished["status"]
    assert f"Service {job_name} exists and does not belong to this job" in failed["message"]


@pytest.mark.versions
def test_finished_job_is_deleted_after_its_ttl_and_its_output_remains(
    deployment: OperatorInstallation, start_program: StartJob
) -> None:
    job = start_program('touch "$FINETUNE_OUTPUT/model"', ttlSecondsAfterFinished=3)
    deployment.kubectl("wait", "--for=condition=Complete", f"ftj/{job}", "--timeout=180s")
    deployment.kubectl("wait", "--for=delete", f"ftj/{job}", "--timeout=30s")
    deployment.kubectl("wait", "--for=delete", "pods", "-l", f"finetune.dev/job-name={job}", "--timeout=60s")
    assert (deployment.get_output_folder(job) / "model").exists()


@pytest.mark.versions
def test_recreated_job_waits_for_the_pods_of_the_deleted_job(
    deployment: OperatorInstallation, start_program: StartJob
) -> None:
    job = start_program(f"exec python3 -c {shlex.quote(RUN_UNTIL_FILE_EXISTS)}", terminationGracePeriodSeconds=45)
    output = deployment.get_output_folder(job)
    deployment.wait_until(job, lambda _: len(list(output.glob("node-*"))) == 2, description="both pods run")
    before = {pod["metadata"]["uid"] for pod in deployment.list_pods(job)}

    deployment.kubectl("delete", "ftj", job)
    start_program("true")
    pending = deployment.wait_until(job, lambda j: "waiting" in j.get("status", {}), description="waiting")
    (output / "end").touch()
    finished = deployment.wait_until_finished(job)

    assert pending["status"]["waiting"]["reason"] == "PredecessorTerminating"
    assert "of a deleted job of the same name still runs" in pending["status"]["waiting"]["message"]
    assert has_condition(finished, "Complete"), finished["status"]
    assert finished["status"].get("restarts", 0) == 0
    assert not before & {pod["metadata"]["uid"] for pod in deployment.list_pods(job)}


@pytest.mark.versions
def test_deleting_a_running_job_in_the_foreground_deletes_all_its_children(
    deployment: OperatorInstallation, start_program: StartJob
) -> None:
    """The fixture `start_job` asserts the same of a deletion in the background, at the end of each test."""
    job = start_program("sleep 600")
    deployment.wait_until(job, lambda j: has_condition(j, "Running"), description="Running")

    deployment.kubectl("delete", "ftj", job, "--cascade=foreground", "--wait=true", "--timeout=150s")

    deadline = time.monotonic() + 150
    kinds = "pods,services,configmaps"
    while remaining := deployment.kubectl("get", kinds, "-l", f"finetune.dev/job-name={job}", "-o", "name"):
        assert time.monotonic() < deadline, f"remaining children: {remaining}"
        time.sleep(0.5)
