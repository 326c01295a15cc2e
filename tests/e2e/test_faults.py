"""Tests of recovery from faults on a real cluster."""

import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testing.cluster.fault_injection import Chaos
from testing.faults.training_job import read_first_step, request_finish, wait_for_save
from testing.models.loss_curve import read_losses
from testing.processes.cluster_training import build_training_fields, find_last_checkpoint_step, wait_for_checkpoint
from testing.processes.operator_stack import (
    OPERATOR_NAMESPACE,
    OperatorInstallation,
    RawBody,
    has_condition,
    run,
)

pytestmark = pytest.mark.cluster
FAULT_INJECTION = Path(__file__).parents[2] / "testing" / "fakes" / "inject"
StartJob = Callable[..., str]


@pytest.mark.versions
def test_job_with_a_stopped_rank_is_restarted_from_its_last_checkpoint(
    deployment: OperatorInstallation, fault_injector: Chaos, start_job: StartJob
) -> None:
    """Other tests kill a rank (test_command_mode), kill a container (test_tenants) and delete a pod."""
    job = start_job(
        training=build_training_fields(max_steps=50, save_steps=20), restartPolicy={"hangTimeoutSeconds": 30}
    )
    saved = wait_for_checkpoint(deployment, job)
    fault_injector.kill_rank(deployment.namespace, f"{job}-0-1", rank=3, signal_number=signal.SIGSTOP)
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    failed, last = finished["status"]["attempts"]
    assert (failed["reason"], failed["nodeRank"], failed["rank"]) == ("Hang", 1, 3), failed
    assert "rank 3 is stopped by a signal" in failed["message"]
    assert last["firstStep"] >= saved > 0
    assert finished["status"]["progress"]["step"] == 50
    assert {pod["metadata"]["labels"]["finetune.dev/attempt"] for pod in deployment.list_pods(job)} == {"1"}


def list_staged_parts(deployment: OperatorInstallation, job: str) -> list[Path]:
    """Return the parts of checkpoints that ranks have written and that are not published."""
    return list((deployment.get_output_folder(job) / "checkpoints").glob(".tmp-attempt-*/state/rank-*.safetensors"))


@pytest.mark.long("takes two minutes; integration kills ranks during a save")
def test_training_resumes_from_the_checkpoint_before_the_one_that_a_killed_node_was_writing(
    deployment: OperatorInstallation, fault_injector: Chaos, start_job: StartJob
) -> None:
    programs = deployment.get_claim_folder("datasets") / "inject"
    shutil.copytree(FAULT_INJECTION, programs, dirs_exist_ok=True)
    run(["chmod", "-R", "a+rX", str(programs)])
    environment = {"PYTHONPATH": "/data/inject", "SLOW_CHECKPOINT_SECONDS": "8"}
    job = start_job(
        lora=None,
        fsdp={},
        training=build_training_fields(max_steps=90, save_steps=30, learningRate=0.002),
        env=[{"name": name, "value": value} for name, value in environment.items()],
    )
    saved = wait_for_checkpoint(deployment, job)
    deadline = time.monotonic() + 60
    while len(list_staged_parts(deployment, job)) < 4:  # two ranks on each of two nodes
        assert time.monotonic() < deadline, "the second checkpoint was not begun"
        time.sleep(0.1)
    # The log, unlike the status, contains each step at once; the second checkpoint takes eight seconds.
    while get_logged_step(deployment, f"{job}-0-0") <= 2 * saved:
        assert time.monotonic() < deadline, "training does not continue"
        time.sleep(0.1)
    assert len(list_staged_parts(deployment, job)) == 4, "the checkpoint was complete before training continued"

    fault_injector.kill_container(deployment.namespace, f"{job}-0-1")
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    failed, last = finished["status"]["attempts"]
    assert (failed["reason"], last["firstStep"], saved) == ("ContainerKilled", 30, 30), finished["status"]
    assert list_staged_parts(deployment, job) == []
    assert find_last_checkpoint_step(deployment, job) == 90
    losses = read_losses(deployment.get_output_folder(job))
    assert list(losses) == list(range(1, 91))


def get_logged_step(deployment: OperatorInstallation, pod: str) -> int:
    """Return the step in the last line of progress of a pod's log, or 0 before the first step."""
    steps = re.findall(r"^step (\d+)/", deployment.kubectl("logs", pod), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def kill_operator(deployment: OperatorInstallation) -> None:
    operators = deployment.kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "name").split()
    assert operators
    deployment.kubectl("delete", "-n", OPERATOR_NAMESPACE, "--grace-period=0", "--force", *operators)


@pytest.mark.alone
def test_killing_the_operator_in_any_phase_does_not_affect_the_job(
    deployment: OperatorInstallation, fault_injector: Chaos, start_training_program: Callable[[], str]
) -> None:
    job = start_training_program()
    kill_operator(deployment)  # before the pods exist

    deployment.wait_until(job, lambda j: len(list_nodes(j)) > 0, description="started")
    kill_operator(deployment)  # while the pods start

    wait_for_save(deployment, job)
    kill_operator(deployment)  # while the program runs

    fault_injector.kill_container(deployment.namespace, f"{job}-0-1")
    kill_operator(deployment)  # while the job restarts

    deployment.wait_until(job, lambda j: j["status"]["attempt"] == 1, description="restarted")
    wait_for_save(deployment, job, after=wait_for_save(deployment, job))
    set_suspended(deployment, job, is_suspended=True)
    deployment.wait_until(job, lambda j: j["status"]["phase"] == "Suspended", description="suspending")
    kill_operator(deployment)  # while the job is being suspended
    deployment.wait_until(job, lambda j: has_condition(j, "Suspended"), description="Suspended")
    saved = wait_for_save(deployment, job)

    set_suspended(deployment, job, is_suspended=False)
    kill_operator(deployment)  # while the job resumes
    last = wait_for_save(deployment, job, after=saved)
    request_finish(deployment, job)
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    assert finished["status"]["restarts"] == 1, finished["status"]["attempts"]
    assert [attempt["action"] for attempt in finished["status"]["attempts"]] == ["Restart", "Suspend", "Complete"]
    assert read_first_step(deployment, f"{job}-2-0") > saved
    assert finished["status"]["progress"]["step"] >= last


def list_nodes(job: RawBody) -> list[RawBody]:
    nodes: list[RawBody] = job.get("status", {}).get("nodes", [])
    return nodes


def set_suspended(deployment: OperatorInstallation, job: str, *, is_suspended: bool) -> None:
    deployment.kubectl(
        "patch", "ftj", job, "--type=merge", "-p", f'{{"spec":{{"suspend":{str(is_suspended).lower()}}}}}'
    )


@pytest.mark.alone
def test_preflight_names_a_throttled_link(
    deployment: OperatorInstallation, fault_injector: Chaos, start_job: StartJob
) -> None:
    """The first attempt measures a link of 20 Mbit/s and fails; the next one, without the limit, trains."""
    fault_injector.throttle("node2", megabits=20)
    try:
        job = start_job(training=build_training_fields(max_steps=4, preflight={"minInterNodeGbps": 0.1}))
        deployment.wait_until(job, lambda j: j.get("status", {}).get("attempt") == 1, description="at attempt 1")
    finally:
        fault_injector.remove_throttle("node2")
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    first = finished["status"]["attempts"][0]
    assert first["reason"] == "NetworkFault", first
    assert "1 of 1 pairs of nodes exchange less than 0.1 Gbit/s" in first["message"]
    network = finished["status"]["progress"]["network"]
    assert [pair["nodes"] for pair in network["pairs"]] == ["0-1"]
    assert network["pairs"][0]["gbps"] >= 0.1
    assert network["allReduceGbps"] > 0
