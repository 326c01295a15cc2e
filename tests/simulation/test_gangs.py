"""Tests that the simulated API server and scheduler treat PodGroups as Kubernetes 1.37 does, and of jobs as gangs."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError
from testing.fakes.virtual_time import run_in_virtual_time
from testing.simulator.history import JobScenario, Liveness, Scenario, Trigger, run_history
from testing.simulator.incidents.gang_incidents import (
    preempt_gang,
    reject_pod_groups,
    remove_pod_group_api,
    switch_off_feature_gate,
)
from testing.simulator.incidents.job_incidents import Incident
from testing.simulator.scenarios import GANG_KINDS, SCENARIO_KINDS
from testing.simulator.world.apiserver import POD_GROUP_VERSION, ObjectKey
from testing.simulator.world.choices import SeededChoices
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.trainer import Workload
from testing.simulator.world.world import JOB, World, WorldOptions

GANG: dict[str, Any] = {"scheduling": {}, "restartPolicy": {"maxRestarts": 0, "maxInfrastructureRestarts": 0}}
POD_GROUPS = f"/apis/{POD_GROUP_VERSION}/namespaces/default/podgroups"


class SchedulerWorld:
    """SchedulerWorld of two pods in a world with three Kubernetes nodes."""

    def __init__(self) -> None:
        workload = Workload(num_nodes=2, step_seconds=3600.0, rendezvous_timeout_seconds=3600.0)
        options = WorldOptions(has_pod_groups=True, k8s_nodes=3)
        self.world = World(SeededChoices(0), workload, options=options)

    async def create_group(self, name: str, *, priority: str = "") -> None:
        spec = {"schedulingPolicy": {"gang": {"minCount": 2}}, "priorityClassName": priority}
        manifest = {"kind": names.POD_GROUP_KIND, "metadata": {"name": name, "namespace": "default"}, "spec": spec}
        self.world.server.handle("POST", POD_GROUPS, body=manifest, params={}, actor="user")
        await asyncio.sleep(30.0)

    async def create_pods(self, group: str, *pod_names: str, **params: str) -> None:
        """Create pods of a group, and wait until the scheduler and the kubelets have handled them."""
        for name in pod_names:
            labels = {names.JOB_UID: group, names.ATTEMPT: "0", names.NODE_RANK: str(int(name[-1]) % 2)}
            metadata = {"name": name, "namespace": "default", "labels": labels}
            body = {"kind": "Pod", "metadata": metadata, "spec": {"schedulingGroup": {"podGroupName": group}}}
            path = "/api/v1/namespaces/default/pods"
            self.world.server.handle("POST", path, body=body, params=params, actor="user")
        await asyncio.sleep(30.0)

    def get_condition(self, pod_name: str) -> dict[str, str]:
        pod = self.world.server.get(ObjectKey("Pod", "default", pod_name))
        assert pod is not None
        condition: dict[str, str] = pod["status"].get("conditions", [{}])[-1]
        return condition

    def list_running_pods(self) -> list[str]:
        pods = (pod for _, pod in self.world.list_all_pods())
        return [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]


def run_with_gangs(test: Callable[[SchedulerWorld], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await test(SchedulerWorld())

    run_in_virtual_time(run())


def test_gang_starts_once_its_group_and_all_its_pods_exist_and_fit() -> None:
    async def run(gangs: SchedulerWorld) -> None:
        await gangs.create_pods("a", "a0", "a1")
        assert (gangs.list_running_pods(), gangs.get_condition("a0")) == ([], {})
        await gangs.create_group("a")
        assert gangs.list_running_pods() == ["a0", "a1"]
        await gangs.create_group("b")
        await gangs.create_pods("b", "b0")
        assert gangs.get_condition("b0") == {}
        await gangs.create_pods("b", "b1")
        assert gangs.list_running_pods() == ["a0", "a1"]
        messages = sorted(gangs.get_condition(name)["message"] for name in ("b0", "b1"))
        assert "Insufficient example.com/slot" in messages[0]
        assert "minCount (2) cannot be satisfied: 1 scheduled" in messages[1]

    run_with_gangs(run)


def test_gang_of_higher_priority_preempts_a_whole_gang() -> None:
    async def run(gangs: SchedulerWorld) -> None:
        for name, priority in (("a", "low"), ("b", "high")):
            await gangs.create_group(name, priority=priority)
            await gangs.create_pods(name, f"{name}0", f"{name}1")
        await asyncio.sleep(60.0)
        assert gangs.list_running_pods() == ["b0", "b1"]
        preempted = [line for line in gangs.world.trace if "scheduler" in line and "terminating" in line]
        assert len(preempted) == 2

    run_with_gangs(run)


def test_dry_run_stores_nothing_and_shows_whether_the_feature_gate_is_on() -> None:
    async def run(gangs: SchedulerWorld) -> None:
        await gangs.create_pods("a", "a0", dryRun="All")
        gangs.world.server.keeps_scheduling_groups = False
        await gangs.create_pods("a", "a0", dryRun="All")
        assert gangs.world.list_all_pods() == []
        assert ["schedulingGroup" in pod["spec"] for pod in gangs.world.server.dry_runs] == [True, False]

    run_with_gangs(run)


def test_pod_groups_can_be_rejected_and_not_served() -> None:
    async def run(gangs: SchedulerWorld) -> None:
        gangs.world.server.rejects_pod_groups = True
        with pytest.raises(ApiError, match="exceeded quota") as rejected:
            await gangs.create_group("a")
        gangs.world.server.served_versions.discard(POD_GROUP_VERSION)
        with pytest.raises(ApiError, match="could not find the requested resource") as unserved:
            await gangs.create_group("a")
        assert (rejected.value.status, unserved.value.status) == (403, 404)

    run_with_gangs(run)


def test_job_that_is_preempted_twenty_times_completes() -> None:
    incidents = tuple((Trigger(seconds=20.0 + 200.0 * number), preempt_gang) for number in range(20))
    scenario = Scenario(
        workload=Workload(num_nodes=2, total_steps=2000, save_steps=1000),
        spec_fields=GANG,
        incidents=incidents,
        options=WorldOptions(has_pod_groups=True, k8s_nodes=8),
        faults_end_seconds=4100.0,
        liveness=Liveness.COMPLETES,
    )

    history = run_history(scenario, SeededChoices(0))

    assert (history.violations, history.phase, history.restarts) == ([], "Complete", 20)


@pytest.mark.parametrize(
    ("upgrade", "reason"),
    [
        (remove_pod_group_api, "NoGroupScheduler"),
        (switch_off_feature_gate, "NoGroupScheduler"),
        (reject_pod_groups, "CreateRefused"),
    ],
)
def test_job_waits_until_pod_groups_work(upgrade: Incident, reason: str) -> None:
    reasons: list[str] = []

    def record_reason(world: World, job: SimulatedJob) -> None:
        reasons.append(job.status["waiting"]["reason"])

    scenario = Scenario(
        spec_fields=GANG,
        incidents=((Trigger(seconds=0.0), upgrade), (Trigger(seconds=8.0), record_reason)),
        options=WorldOptions(has_pod_groups=True),
        liveness=Liveness.COMPLETES_UNDISTURBED,
    )

    history = run_history(scenario, SeededChoices(1))

    assert (history.violations, history.phase, reasons) == ([], "Complete", [reason])


def test_gangs_that_need_the_same_nodes_run_one_after_the_other() -> None:
    other_job = JobScenario(JOB._replace(name="gpt"), spec_fields=GANG, liveness=Liveness.COMPLETES_UNDISTURBED)
    scenario = Scenario(
        spec_fields=GANG,
        further_jobs=(other_job,),
        options=WorldOptions(has_pod_groups=True, k8s_nodes=3),
        liveness=Liveness.COMPLETES_UNDISTURBED,
    )

    history = run_history(scenario, SeededChoices(0))

    assert (history.violations, history.phase, history.restarts) == ([], "Complete", 0)


@pytest.mark.parametrize("kind", [draw.__name__ for draw in GANG_KINDS])
def test_equal_seeds_give_equal_histories_of_gangs(kind: str) -> None:
    all_choices = [SeededChoices(3) for _ in range(2)]
    first, second = (run_history(SCENARIO_KINDS[kind](choices), choices).trace for choices in all_choices)

    assert first == second
