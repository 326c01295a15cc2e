"""Tests of jobs whose pods are placed in one rack, on a real cluster with labelled Kubernetes nodes."""

import json
import secrets
from collections.abc import Iterator

import pytest

from testing.processes.gangs import Gangs
from testing.processes.operator_stack import OperatorInstallation
from testing.processes.queues import Queues, wait_until_running

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
RACK = "example.com/rack"


@pytest.fixture
def racks(deployment: OperatorInstallation) -> Iterator[dict[str, str]]:
    """Label each Kubernetes node with a rack of its own, and return the racks by node."""
    nodes = [node["metadata"]["name"] for node in json.loads(deployment.kubectl("get", "nodes", "-o", "json"))["items"]]
    racks = {node: f"rack-{number}" for number, node in enumerate(sorted(nodes))}
    for node, rack in racks.items():
        deployment.kubectl("label", "node", node, f"{RACK}={rack}", "--overwrite")
    yield racks
    for node in nodes:
        deployment.kubectl("label", "node", node, f"{RACK}-")


def get_nodes_by_rank(deployment: OperatorInstallation, job: str) -> list[str]:
    wait_until_running(deployment, job)
    pods = sorted(deployment.list_pods(job), key=lambda pod: int(pod["metadata"]["labels"]["finetune.dev/node-rank"]))
    return [pod["spec"]["nodeName"] for pod in pods]


def test_kueue_places_ranks_in_the_order_of_the_racks(deployment: OperatorInstallation, racks: dict[str, str]) -> None:
    queues = Queues(deployment, name=f"q-{secrets.token_hex(3)}")
    queues.create(cpu="16", topology=RACK)
    scheduling = {"queueName": queues.name, "schedulingConstraints": {"topology": [{"key": RACK, "mode": "Preferred"}]}}
    cpus = {"cpu": "800m"}  # two pods fit on a Kubernetes node
    try:
        job = queues.submit("a", numNodes=4, resources={"requests": cpus}, scheduling=scheduling)

        nodes = get_nodes_by_rank(deployment, job)

        assert [racks[node] for node in nodes] == sorted(racks[node] for node in nodes)
        assert len(set(nodes)) == 2
    finally:
        queues.remove()


def test_kueue_waits_for_a_rack_with_room_for_all_pods(deployment: OperatorInstallation, racks: dict[str, str]) -> None:
    queues = Queues(deployment, name=f"q-{secrets.token_hex(3)}")
    queues.create(cpu="16", topology=RACK)
    scheduling = {"queueName": queues.name, "schedulingConstraints": {"topology": [{"key": RACK}]}}
    try:
        job = queues.submit("a", numNodes=4, resources={"requests": {"cpu": "800m"}}, scheduling=scheduling)

        deployment.wait_until(
            job,
            lambda body: "topology" in body.get("status", {}).get("waiting", {}).get("message", ""),
            description="waiting for a rack",
            timeout_seconds=60,
        )
        assert len(racks) == 2
    finally:
        queues.remove()


def test_kubernetes_places_a_gang_in_one_rack(deployment: OperatorInstallation, racks: dict[str, str]) -> None:
    gangs = Gangs(deployment)
    gangs.create()
    gangs.add_room()
    scheduling = {"schedulingConstraints": {"topology": [{"key": RACK}]}}
    try:
        fitting, larger = (
            gangs.submit(name, nodes=nodes, scheduling=scheduling) for name, nodes in (("a", 2), ("b", 3))
        )

        assert len({racks[node] for node in get_nodes_by_rank(deployment, fitting)}) == 1
        deployment.wait_until(
            larger,
            lambda body: "cannot be placed" in body.get("status", {}).get("waiting", {}).get("message", ""),
            description="waiting for a rack",
            timeout_seconds=60,
        )
    finally:
        gangs.remove()
