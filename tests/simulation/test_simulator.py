"""Tests that the simulator behaves like Kubernetes; tests/e2e/test_simulator_contract.py checks a real cluster."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from finetune_operator import names
from testing.fakes.virtual_time import run_in_virtual_time
from testing.simulator.conformance.checks import CHECKS, ClusterUnderTest, Facts
from testing.simulator.conformance.expected_results import EXPECTED_RESULTS
from testing.simulator.history import Scenario, run_history
from testing.simulator.scenarios import SCENARIO_KINDS
from testing.simulator.world.apiserver import RawBody
from testing.simulator.world.choices import ReplayedChoices, SeededChoices, shrink
from testing.simulator.world.kubernetes_nodes import KubernetesNode
from testing.simulator.world.network import Connection
from testing.simulator.world.operator_connection import OperatorConnection
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import World

SHORT_LIVED = "short-lived"
Check = Callable[[ClusterUnderTest], Awaitable[Facts]]


def build_pod(name: str, *, node_rank: str = "0", **spec: object) -> RawBody:
    labels = {names.JOB_UID: "none", names.ATTEMPT: "0", names.NODE_RANK: node_rank}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def end_short_lived_pods(world: World) -> None:
    """End the processes of short-lived pods with exit code 1."""
    while True:
        for _, body in world.list_all_pods():
            process, _ = world.k8s_nodes.processes.get(body["metadata"]["uid"], (None, None))
            if process and process.is_running and body["spec"].get("schedulerName") == SHORT_LIVED:
                world.trainer.kill(process, code=1)
        await asyncio.sleep(0.05)


async def run_check(check: Check) -> Facts:
    world = World(SeededChoices(0), Workload(num_nodes=2))
    ending = asyncio.create_task(end_short_lived_pods(world))
    connection = Connection(world.server, world.choices, actor="contract", on_crash=lambda: None)
    cluster = ClusterUnderTest(
        api=OperatorConnection(connection),
        namespace="contract",
        build_long_running_pod=build_pod,
        build_short_lived_pod=lambda name: build_pod(name, schedulerName=SHORT_LIVED),
        build_unschedulable_pod=lambda name: build_pod(name, nodeSelector={"example.com/none": "there"}),
    )
    try:
        return await check(cluster)
    finally:
        ending.cancel()


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_simulator_passes_the_conformance_checks(check: Check) -> None:
    assert run_in_virtual_time(run_check(check)) == EXPECTED_RESULTS[check.__name__]


async def observe_pod_on_lost_k8s_node(
    lose_k8s_node: Callable[[World, KubernetesNode], None],
) -> list[tuple[bool, bool, bool, str]]:
    """Observe a pod before its Kubernetes node is lost, ten minutes later and after the node has recovered.

    Each observation is (pod exists, pod is terminating, process runs, reason of the disruption).
    """
    world = World(SeededChoices(0), Workload(num_nodes=2, rendezvous_timeout_seconds=3600.0))
    body = build_pod("lost")
    body["metadata"]["namespace"] = "default"
    world.server.create(body, actor="user")
    await asyncio.sleep(10.0)
    [(process, k8s_node)] = world.k8s_nodes.processes.values()

    def observe_pod() -> tuple[bool, bool, bool, str]:
        pods = [body for _, body in world.list_all_pods()]
        reasons = [
            c["reason"] for body in pods for c in body["status"]["conditions"] if c["type"] == "DisruptionTarget"
        ]
        terminating = any("deletionTimestamp" in body["metadata"] for body in pods)
        return bool(pods), terminating, process.is_running, "".join(reasons)

    observations = [observe_pod()]
    lose_k8s_node(world, k8s_node)
    await asyncio.sleep(600.0)
    observations.append(observe_pod())
    world.node_controllers.recover(k8s_node)
    await asyncio.sleep(60.0)
    return [*observations, observe_pod()]


def stop_kubelet(world: World, k8s_node: KubernetesNode) -> None:
    world.node_controllers.stop_kubelet(k8s_node)


def delete_k8s_node(world: World, k8s_node: KubernetesNode) -> None:
    world.node_controllers.stop_kubelet(k8s_node)
    world.node_controllers.delete_node(k8s_node)


def taint_out_of_service(world: World, k8s_node: KubernetesNode) -> None:
    world.node_controllers.stop_kubelet(k8s_node)
    world.node_controllers.taint_out_of_service(k8s_node)


@pytest.mark.parametrize(
    ("lose_k8s_node", "expected_observation"),
    [
        (stop_kubelet, (True, True, True, "DeletionByTaintManager")),
        (delete_k8s_node, (False, False, True, "")),
        (taint_out_of_service, (False, False, True, "")),
    ],
)
def test_process_on_lost_kubernetes_node_runs_until_kubelet_recovers(
    lose_k8s_node: Callable[[World, KubernetesNode], None], expected_observation: tuple[bool, bool, bool, str]
) -> None:
    before, lost, recovered = run_in_virtual_time(observe_pod_on_lost_k8s_node(lose_k8s_node))

    assert before == (True, False, True, "")
    assert lost == expected_observation
    assert recovered == (False, False, False, "")


def test_every_check_has_expected_results() -> None:
    assert set(EXPECTED_RESULTS) == {check.__name__ for check in CHECKS}


def test_history_without_faults_completes_with_few_writes() -> None:
    history = run_history(Scenario(), SeededChoices(0))

    assert (history.violations, history.phase, history.restarts) == ([], "Complete", 0)
    assert history.commits < 45


def test_shrinking_removes_and_lowers_choices() -> None:
    candidates = []

    def is_failing(choices: list[int]) -> bool:
        candidates.append(choices)
        return 7 in choices and choices[:1] != [7]

    assert shrink([3, 1, 4, 7, 5, 9, 2, 6], is_failing, max_runs=100) == [0, 7]
    assert len(candidates) < 100


def test_recorded_choices_replay_the_history() -> None:
    choices = SeededChoices(7)
    first = run_history(SCENARIO_KINDS["all_faults"](choices), choices)
    replayed = ReplayedChoices(choices.drawn)

    assert run_history(SCENARIO_KINDS["all_faults"](replayed), replayed).trace == first.trace


def test_equal_seeds_give_equal_histories() -> None:
    first, second = (run_history(Scenario(), SeededChoices(7)).trace for _ in range(2))

    assert first == second
