"""Tests of jobs that the scheduler of Kubernetes starts as a group, on a real cluster with its feature gates."""

from collections.abc import Iterator

import pytest
import yaml

from testing.processes.gangs import Gangs
from testing.processes.operator_stack import REPOSITORY, OperatorInstallation, has_condition
from testing.processes.queues import wait_until_running
from testing.processes.waiting import wait_until

pytestmark = pytest.mark.cluster

NO_ROOM_FOR_ONE = "1 of 3 pods cannot be placed: 0/2 nodes are available: 2 Insufficient"


@pytest.fixture
def gangs(deployment: OperatorInstallation) -> Iterator[Gangs]:
    gangs = Gangs(deployment)
    gangs.create()
    yield gangs
    gangs.remove()


def wait_for_message(deployment: OperatorInstallation, job: str, text: str) -> None:
    deployment.wait_until(
        job,
        lambda body: text in body.get("status", {}).get("waiting", {}).get("message", ""),
        description=f"waiting: {text}",
        timeout_seconds=60,
    )


def test_gang_of_three_does_not_start_with_room_for_two(deployment: OperatorInstallation, gangs: Gangs) -> None:
    job = gangs.submit("a", nodes=3)

    status = deployment.wait_until(
        job, lambda body: "scheduling" in body.get("status", {}), description="chooses a provider"
    )["status"]
    assert status["scheduling"]["provider"] == "PodGroup"
    wait_for_message(deployment, job, NO_ROOM_FOR_ONE)
    assert not any(pod["spec"].get("nodeName") for pod in deployment.list_pods(job))
    gangs.add_room()
    wait_until_running(deployment, job)


def test_two_gangs_do_not_hold_each_others_room(deployment: OperatorInstallation, gangs: Gangs) -> None:
    """Without gang scheduling, each of two jobs could get one of two places and wait for the other one."""
    first, second = (gangs.submit(name, program="sleep 5") for name in "ab")

    for job in (first, second):
        assert has_condition(deployment.wait_until_finished(job, timeout_seconds=90), "Complete")
        assert deployment.get_job(job)["status"]["restarts"] == 0


def test_gang_restarts_as_a_gang(deployment: OperatorInstallation, gangs: Gangs) -> None:
    job = gangs.submit("a")
    wait_until_running(deployment, job)

    deployment.kubectl("delete", "pod", f"{job}-0-1", "--wait=false")

    wait_until_running(deployment, job, attempt=1, timeout_seconds=90)
    assert deployment.get_job(job)["status"]["attempt"] == 1
    wait_until(lambda: len(gangs.list_pod_groups(job)) == 1, goal="the PodGroup of the first attempt is deleted")


def test_gang_is_preempted_as_a_whole(deployment: OperatorInstallation, gangs: Gangs) -> None:
    first = gangs.submit("a", priority="gang-low")
    wait_until_running(deployment, first)

    second = gangs.submit("b", priority="gang-high")

    wait_until_running(deployment, second)
    deployment.wait_until(first, lambda body: body["status"]["attempt"] == 1, description="preempted")
    record = deployment.get_job(first)["status"]["attempts"][0]
    assert record["reason"] == "Preempted"
    deployment.delete(second)
    wait_until_running(deployment, first)


def test_deleted_job_leaves_no_pod_group(deployment: OperatorInstallation, gangs: Gangs) -> None:
    job = gangs.submit("a")
    wait_until_running(deployment, job)

    deployment.delete(job)

    wait_until(lambda: not gangs.list_pod_groups(job), goal="the PodGroup is deleted")
    wait_until(lambda: not deployment.list_pods(job), goal="the pods are deleted")


def test_example_gang_waits_for_room(deployment: OperatorInstallation) -> None:
    """No Kubernetes node has its GPUs."""
    deployment.apply(yaml.safe_load((REPOSITORY / "manifests" / "examples" / "gang.yaml").read_text()))
    try:
        wait_for_message(deployment, "gang", "cannot be placed")
        assert deployment.get_job("gang")["status"]["scheduling"]["provider"] == "PodGroup"
    finally:
        deployment.delete("gang")
