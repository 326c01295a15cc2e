"""Tests that the simulated Kueue behaves as Kueue 0.19 did on a real cluster (tests/queue), and of jobs that use it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from finetune_operator import names
from testing.fakes.virtual_time import run_in_virtual_time
from testing.simulator.history import JobScenario, Liveness, Scenario, Trigger, run_history
from testing.simulator.incidents.queue_incidents import get_workload_key
from testing.simulator.scenarios import QUEUE_KINDS, SCENARIO_KINDS
from testing.simulator.world.apiserver import ObjectKey, RawBody
from testing.simulator.world.choices import SeededChoices
from testing.simulator.world.cluster_queue import EVICTED, QUOTA_RESERVED, has_condition
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.kueue import GROUP_LABEL, PRIORITY_LABEL, QUEUE_LABEL, TOTAL_COUNT
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import JOB, World, WorldOptions

QUEUE = {"scheduling": {"queueName": "gpus"}}
NO_RESTARTS = {"restartPolicy": {"maxRestarts": 0, "maxInfrastructureRestarts": 0}}


class Groups:
    """Pod groups of two pods in a world with a quota of three pods."""

    def __init__(self) -> None:
        options = WorldOptions(queue_quota=3, k8s_nodes=8)
        workload = Workload(num_nodes=2, step_seconds=3600.0, rendezvous_timeout_seconds=3600.0)
        self.world = World(SeededChoices(0), workload, options=options)

    async def create(self, group: str, *pod_names: str, priority: str = "", cpu: str = "1") -> None:
        """Create pods of a group, and wait until Kueue and the kubelets have handled them."""
        for name in pod_names:
            labels = {QUEUE_LABEL: "gpus", GROUP_LABEL: group, names.JOB_UID: group, names.ATTEMPT: "0"}
            labels |= {names.NODE_RANK: str(int(name[-1]) % 2), **({PRIORITY_LABEL: priority} if priority else {})}
            metadata = {"name": name, "namespace": "default", "labels": labels, "annotations": {TOTAL_COUNT: "2"}}
            spec = {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": cpu}}}]}
            self.world.server.create({"kind": "Pod", "metadata": metadata, "spec": spec}, actor="user")
        await asyncio.sleep(30.0)

    async def delete(self, *pod_names: str) -> None:
        for name in pod_names:
            self.world.delete(ObjectKey("Pod", "default", name), {})
        await asyncio.sleep(60.0)

    def get_workload(self, group: str) -> RawBody | None:
        return self.world.server.get(ObjectKey(names.WORKLOAD_KIND, "default", group))

    def is_admitted(self, group: str) -> bool:
        return has_condition(self.get_workload(group) or {}, QUOTA_RESERVED)

    def list_pods(self) -> dict[str, str]:
        """Return the phase of each pod, with a mark if it is being deleted."""
        pods = (pod for _, pod in self.world.list_all_pods())
        return {
            pod["metadata"]["name"]: pod["status"]["phase"] + "!" * ("deletionTimestamp" in pod["metadata"])
            for pod in pods
        }


def run_with_groups(test: Callable[[Groups], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await test(Groups())

    run_in_virtual_time(run())


def test_group_is_admitted_once_all_its_pods_exist_and_fit() -> None:
    async def run(groups: Groups) -> None:
        await groups.create("a", "a0")
        assert (groups.get_workload("a"), groups.list_pods()) == (None, {"a0": "Pending"})
        await groups.create("a", "a1")
        await groups.create("b", "b0", "b1")
        assert groups.list_pods() == {"a0": "Running", "a1": "Running", "b0": "Pending", "b1": "Pending"}

    run_with_groups(run)


def test_failed_pods_keep_the_quota_until_equal_pods_replace_them() -> None:
    async def run(groups: Groups) -> None:
        await groups.create("a", "a0", "a1")
        await groups.create("b", "b0", "b1")
        await groups.delete("a0", "a1")
        assert groups.list_pods() == {"a0": "Failed!", "a1": "Failed!", "b0": "Pending", "b1": "Pending"}
        await groups.create("a", "a2", "a3")
        assert groups.list_pods() == {"b0": "Pending", "b1": "Pending", "a2": "Running", "a3": "Running"}

    run_with_groups(run)


def test_new_pods_beside_running_ones_are_deleted() -> None:
    async def run(groups: Groups) -> None:
        await groups.create("a", "a0", "a1")
        await groups.create("a", "a2")
        assert groups.list_pods() == {"a0": "Running", "a1": "Running"}

    run_with_groups(run)


def test_pods_with_other_requests_wait_in_the_group() -> None:
    async def run(groups: Groups) -> None:
        await groups.create("a", "a0", "a1")
        await groups.delete("a0", "a1")
        await groups.create("a", "a2", "a3", cpu="2")
        assert groups.list_pods() == {"a0": "Failed!", "a1": "Failed!", "a2": "Pending", "a3": "Pending"}

    run_with_groups(run)


def test_deletion_of_a_workload_returns_quota_and_deletes_its_pods() -> None:
    async def run(groups: Groups) -> None:
        await groups.create("a", "a0", "a1")
        await groups.create("b", "b0", "b1")
        await groups.delete("a0", "a1")
        groups.world.delete(ObjectKey(names.WORKLOAD_KIND, "default", "a"), {})
        await asyncio.sleep(30.0)
        assert groups.list_pods() == {"b0": "Running", "b1": "Running"}

    run_with_groups(run)


def test_preempted_group_is_queued_again_once_its_pods_are_replaced() -> None:
    async def run(groups: Groups) -> None:
        await groups.create("a", "a0", "a1", priority="low")
        await groups.create("b", "b0", "b1", priority="high")
        await asyncio.sleep(60.0)
        assert groups.list_pods() == {"a0": "Failed!", "a1": "Failed!", "b0": "Running", "b1": "Running"}
        (condition,) = (
            condition
            for _, pod in groups.world.list_all_pods()
            for condition in pod["status"]["conditions"]
            if condition["type"] == "TerminationTarget" and pod["metadata"]["name"] == "a0"
        )
        preemptor = groups.get_workload("b")
        assert preemptor is not None
        assert (condition["reason"], preemptor["metadata"]["uid"] in condition["message"]) == (
            "WorkloadEvictedDueToPreempted",
            True,
        )
        await groups.create("a", "a2", "a3", priority="low")
        groups.world.delete(ObjectKey(names.WORKLOAD_KIND, "default", "b"), {})
        await asyncio.sleep(60.0)
        assert groups.list_pods() == {"a2": "Running", "a3": "Running"}
        assert not has_condition(groups.get_workload("a") or {}, EVICTED)

    run_with_groups(run)


def preempt_briefly(world: World, job: SimulatedJob) -> None:
    """Preempt all jobs, and return the quota after five seconds."""
    key = world.kueue.submit_competitor(pods=world.kueue.queue.quota, priority=5000)
    asyncio.get_running_loop().call_later(5.0, lambda: world.server.remove(key, actor="kueue"))


def test_job_that_is_preempted_twenty_times_completes() -> None:
    incidents = tuple((Trigger(seconds=20.0 + 40.0 * number), preempt_briefly) for number in range(20))
    scenario = Scenario(
        workload=Workload(num_nodes=2, total_steps=600),
        spec_fields={**QUEUE, **NO_RESTARTS},
        incidents=incidents,
        options=WorldOptions(queue_quota=2),
        faults_end_seconds=900.0,
        liveness=Liveness.COMPLETES,
    )

    history = run_history(scenario, SeededChoices(0))

    assert (history.violations, history.phase, history.restarts) == ([], "Complete", 20)


def test_job_waits_while_its_workload_is_deactivated() -> None:
    messages: list[str] = []

    def deactivate(world: World, job: SimulatedJob) -> None:
        world.kueue.set_active(get_workload_key(job), active=False)

    def activate(world: World, job: SimulatedJob) -> None:
        messages.append(job.status["waiting"]["message"])
        world.kueue.set_active(get_workload_key(job), active=True)

    scenario = Scenario(
        spec_fields={**QUEUE, **NO_RESTARTS},
        incidents=((Trigger(seconds=8.0), deactivate), (Trigger(seconds=3000.0), activate)),
        options=WorldOptions(queue_quota=2),
        faults_end_seconds=3100.0,
        liveness=Liveness.COMPLETES,
    )

    history = run_history(scenario, SeededChoices(1))

    assert (history.violations, history.phase, history.restarts) == ([], "Complete", 1)
    assert messages == ["the Workload in LocalQueue gpus is deactivated; set its spec.active to true"]


@pytest.mark.parametrize("kind", [draw.__name__ for draw in QUEUE_KINDS])
def test_equal_seeds_give_equal_histories_of_queued_jobs(kind: str) -> None:
    all_choices = [SeededChoices(3) for _ in range(2)]
    first, second = (run_history(SCENARIO_KINDS[kind](choices), choices).trace for choices in all_choices)

    assert first == second


def test_jobs_of_one_queue_run_one_after_the_other() -> None:
    other_job = JobScenario(JOB._replace(name="gpt"), spec_fields=QUEUE, liveness=Liveness.COMPLETES_UNDISTURBED)
    scenario = Scenario(
        spec_fields=QUEUE,
        further_jobs=(other_job,),
        liveness=Liveness.COMPLETES_UNDISTURBED,
        options=WorldOptions(queue_quota=3, k8s_nodes=8),
    )

    history = run_history(scenario, SeededChoices(0))

    assert (history.violations, history.phase, history.restarts) == ([], "Complete", 0)
