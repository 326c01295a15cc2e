"""Tests of jobs whose pods wait for other controllers, or use the network of their Kubernetes node."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from testing.processes.operator_stack import OperatorInstallation, build_example_job, get_reported_step, has_condition

pytestmark = pytest.mark.cluster
GATE = "example.com/approval"
HOST_NETWORK_NAMESPACE = "finetune-host-network"


def remove_gates(deployment: OperatorInstallation, job: str) -> None:
    """Remove the gates of the pods, as the controller does that set them."""
    patch = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    for pod in deployment.list_pods(job):
        deployment.kubectl("patch", "pod", pod["metadata"]["name"], "--type=json", "-p", patch)


def test_a_job_waits_until_another_controller_removes_its_gates(
    deployment: OperatorInstallation, start_program: Callable[..., str]
) -> None:
    job = start_program("true", podTemplate={"schedulingGates": [{"name": GATE}]})
    message = f"2 of 2 pods wait until other controllers remove scheduling gates: {GATE}"
    waiting = deployment.wait_until(
        job,
        # the first pass may know only one of the pods
        lambda body: message in body.get("status", {}).get("waiting", {}).get("message", ""),
        description="waiting for the gate",
    )
    assert waiting["status"]["waiting"]["reason"] == "SchedulingGated"
    remove_gates(deployment, job)
    assert has_condition(deployment.wait_until_finished(job), "Complete")


@pytest.fixture
def unrestricted(deployment: OperatorInstallation) -> Iterator[OperatorInstallation]:
    """Return a namespace in which pods may use the host network, with the claims of the example."""
    unrestricted = replace(deployment, namespace=HOST_NETWORK_NAMESPACE)
    unrestricted.kubectl("create", "namespace", HOST_NETWORK_NAMESPACE)
    unrestricted.prepare_storage()
    yield unrestricted
    unrestricted.kubectl("delete", "namespace", HOST_NETWORK_NAMESPACE, "--timeout=120s")


def test_a_job_trains_on_the_host_network(unrestricted: OperatorInstallation, job_name: str) -> None:
    fields = {"network": {"interface": "eth0"}, "podTemplate": {"hostNetwork": True}}
    unrestricted.apply(build_example_job(job_name, **fields))
    running = unrestricted.wait_until(job_name, lambda job: get_reported_step(job) > 0, description="training")
    pods = unrestricted.list_pods(job_name)

    assert all(pod["status"]["podIP"] == pod["status"]["hostIP"] for pod in pods)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == running["spec"]["numNodes"] == 2
    assert has_condition(unrestricted.wait_until_finished(job_name), "Complete")


def test_a_restricted_namespace_rejects_the_host_network(
    deployment: OperatorInstallation, start_job: Callable[..., str]
) -> None:
    job = start_job(network={"interface": "eth0"}, podTemplate={"hostNetwork": True})
    waiting = deployment.wait_until(
        job,
        lambda body: body.get("status", {}).get("waiting", {}).get("reason") == "CreateRefused",
        description="rejected",
    )
    assert "violates PodSecurity" in waiting["status"]["waiting"]["message"]
