"""Tests of jobs whose pods are placed in one rack, on a real cluster with labelled Kubernetes nodes."""

import json
import secrets
from collections.abc import Iterator

import pytest

from testing.processes.gangs import Gangs
from testing.processes.operator_stack import OperatorInstallation
from testing.processes.queues import Queues, wait_until_running

pytestmark = pytest.mark.cluster


@pytest.fixture
def slots(deployment: OperatorInstallation) -> Iterator[Gangs]:
    """Give each Kubernetes node two slots, of which the pods of other tests use none."""
    gangs = Gangs(deployment)
    gangs.create()
    gangs.add_room()
    yield gangs
    gangs.remove()


@pytest.fixture
def label(slots: Gangs) -> str:
    return f"example.com/rack-{slots.prefix}"


@pytest.fixture
def racks(deployment: OperatorInstallation, label: str) -> Iterator[dict[str, str]]:
    """Label each Kubernetes node with a rack of its own, and return the racks by node."""
    nodes = [node["metadata"]["name"] for node in json.loads(deployment.kubectl("get", "nodes", "-o", "json"))["items"]]
    racks = {node: f"rack-{number}" for number, node in enumerate(sorted(nodes))}
    for node, rack in racks.items():
        deployment.kubectl("label", "node", node, f"{label}={rack}")
    yield racks
    for node in nodes:
        deployment.kubectl("label", "node", node, f"{label}-")


def get_nodes_by_rank(deployment: OperatorInstallation, job: str) -> list[str]:
    wait_until_running(deployment, job)
    pods = sorted(deployment.list_pods(job), key=lambda pod: int(pod["metadata"]["labels"]["finetune.dev/node-rank"]))
    return [pod["spec"]["nodeName"] for pod in pods]


@pytest.fixture
def queues(deployment: OperatorInstallation, slots: Gangs, label: str) -> Iterator[Queues]:
    """Return a queue with quota for 16 slots, from which Kueue assigns pods to racks."""
    queues = Queues(deployment, name=f"q-{secrets.token_hex(3)}")
    queues.create({"cpu": "16", slots.resource: "16"}, topology=label)
    yield queues
    queues.remove()


def submit_four_pods(queues: Queues, slots: Gangs, constraint: dict[str, str]) -> str:
    """Submit a job that needs all slots of two Kubernetes nodes."""
    resources = {"requests": {"cpu": "10m"}, "limits": {slots.resource: 1}}
    scheduling = {"queueName": queues.name, "schedulingConstraints": {"topology": [constraint]}}
    return queues.submit("a", numNodes=4, nprocPerNode=1, resources=resources, scheduling=scheduling)


def test_kueue_places_ranks_in_the_order_of_the_racks(
    deployment: OperatorInstallation, queues: Queues, slots: Gangs, racks: dict[str, str], label: str
) -> None:
    job = submit_four_pods(queues, slots, {"key": label, "mode": "Preferred"})

    nodes = get_nodes_by_rank(deployment, job)

    assert [racks[node] for node in nodes] == sorted(racks[node] for node in nodes)
    assert len(set(nodes)) == 2


def test_kueue_waits_for_a_rack_with_room_for_all_pods(
    deployment: OperatorInstallation, queues: Queues, slots: Gangs, racks: dict[str, str], label: str
) -> None:
    job = submit_four_pods(queues, slots, {"key": label})

    deployment.wait_until(
        job,
        lambda body: "topology" in body.get("status", {}).get("waiting", {}).get("message", ""),
        description="waiting for a rack",
        timeout_seconds=60,
    )
    assert len(racks) == 2


def test_kubernetes_places_a_gang_in_one_rack(
    deployment: OperatorInstallation, slots: Gangs, racks: dict[str, str], label: str
) -> None:
    scheduling = {"schedulingConstraints": {"topology": [{"key": label}]}}
    fitting, larger = (slots.submit(name, nodes=nodes, scheduling=scheduling) for name, nodes in (("a", 2), ("b", 3)))

    assert len({racks[node] for node in get_nodes_by_rank(deployment, fitting)}) == 1
    deployment.wait_until(
        larger,
        lambda body: "cannot be placed" in body.get("status", {}).get("waiting", {}).get("message", ""),
        description="waiting for a rack",
        timeout_seconds=60,
    )
