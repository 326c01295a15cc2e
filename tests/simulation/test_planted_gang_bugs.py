"""Tests that the simulator finds bugs by which pods of a gang start alone, or PodGroups are missing or left over."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.scheduling import SchedulingStatus
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator import names
from finetune_operator.controller import execute_actions, observe_group
from finetune_operator.core import decide, derive_status, stop_attempt
from finetune_operator.core.actions import Action, Create
from finetune_operator.core.group_scheduling import delete_earlier_pod_groups
from finetune_operator.failures import restart_budget
from finetune_operator.kube.cluster import Cluster, ClusterError, KubernetesCluster
from finetune_operator.observation.group_apis import GroupApis
from finetune_operator.observation.ownership import RawBody
from finetune_operator.observation.pods import Observation
from finetune_operator.plan import manifests
from finetune_operator.plan.pod_group import build_pod_group as build_original_pod_group
from finetune_operator.plan.run_plan import RunPlan
from finetune_operator.settings import Settings
from testing.simulator.gang_invariants import GangMonitor
from testing.simulator.history import run_history
from testing.simulator.planted_bugs import PlantBug, assert_search_finds
from testing.simulator.scenarios import SCENARIO_KINDS
from testing.simulator.world.choices import SeededChoices


def create_pods_without_their_pod_group(patch: pytest.MonkeyPatch) -> None:
    """Create the pods although the API server rejects their PodGroup."""
    patch.setattr(execute_actions, "_NEEDED_BY_PODS", frozenset({"ConfigMap"}))


def share_one_pod_group(patch: pytest.MonkeyPatch) -> None:
    """Use one PodGroup for all attempts of a job."""
    patch.setattr(names, "pod_group_name", lambda job_name, job_uid, attempt: f"{job_name}-{job_uid[:8]}")


def keep_earlier_pod_groups(patch: pytest.MonkeyPatch) -> None:
    """Never delete the PodGroup of an earlier attempt."""
    patch.setattr(decide, "delete_earlier_pod_groups", lambda context: ())


def delete_only_the_last_pod_group(patch: pytest.MonkeyPatch) -> None:
    """Keep the PodGroup of an attempt that is followed by one without pods."""
    patch.setattr(decide, "delete_earlier_pod_groups", lambda context: delete_earlier_pod_groups(context)[-1:])


def delete_pod_groups_while_pods_are_created(patch: pytest.MonkeyPatch) -> None:
    """Do not retry a failed deletion, because no further pass creates pods."""

    def precedes_pods(action: Action) -> bool:
        return isinstance(action, Create) and action.manifest["kind"] != "Pod"

    patch.setattr(execute_actions, "_precedes_pods", precedes_pods)


def create_pods_before_the_provider_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """Do not wait for a provider."""
    patch.setattr(decide, "waits_for_provider", lambda context: False)


def choose_the_provider_again(patch: pytest.MonkeyPatch) -> None:
    """Forget the provider while the pods of the attempt wait."""

    def derive_scheduling(status: JobStatus, observation: Observation) -> SchedulingStatus | None:
        return original(status, observation) if status.waiting is None else None

    original = derive_status._derive_scheduling
    patch.setattr(derive_status, "_derive_scheduling", derive_scheduling)


def count_preemptions_of_gangs_as_restarts(patch: pytest.MonkeyPatch) -> None:
    """Charge a preemption to the restart budget."""

    def plan_restart(
        verdict: Any, attempt: Any, earlier: Any, counts: Any, limits: restart_budget.RestartLimits
    ) -> restart_budget.RestartPlan:
        limits = replace(limits, starts_as_group=False)
        return restart_budget.plan_restart(verdict, attempt, earlier, counts, limits)

    patch.setattr(stop_attempt, "plan_restart", plan_restart)


def ignore_the_dry_run(patch: pytest.MonkeyPatch) -> None:
    """Choose PodGroups although the API server drops spec.schedulingGroup."""

    async def find_no_problem(cluster: Cluster, job: FineTuneJob, settings: Settings, version: str) -> None:
        """Do nothing."""

    patch.setattr(observe_group, "_find_pod_group_problem", find_no_problem)


def create_the_dry_run_pod_under_its_name(patch: pytest.MonkeyPatch) -> None:
    """Fail every pass while another pod has the name."""

    async def dry_run_create(self: KubernetesCluster, manifest: RawBody) -> RawBody:
        if await self.get("Pod", manifest["metadata"]["namespace"], manifest["metadata"]["name"]):
            raise ClusterError("the pod already exists")
        return await original(self, manifest)

    original = KubernetesCluster.dry_run_create
    patch.setattr(KubernetesCluster, "dry_run_create", dry_run_create)


def start_with_one_pod(patch: pytest.MonkeyPatch) -> None:
    """Let the scheduler place the pods one by one."""

    def build_pod_group(run_plan: RunPlan) -> RawBody | None:
        pod_group = build_original_pod_group(run_plan)
        spec = {"schedulingPolicy": {"gang": {"minCount": 1}}}
        return pod_group and {**pod_group, "spec": {**pod_group["spec"], **spec}}

    patch.setattr(manifests, "build_pod_group", build_pod_group)


def remember_that_the_cluster_has_no_provider(patch: pytest.MonkeyPatch) -> None:
    """Examine the cluster only once per job."""

    async def discover_group_apis(cluster: Cluster, job: FineTuneJob, settings: Settings) -> GroupApis:
        if job.metadata.uid not in known:
            known[job.metadata.uid] = await original(cluster, job, settings)
        return known[job.metadata.uid]

    known: dict[str, GroupApis] = {}
    original = observe_group.discover_group_apis
    patch.setattr(observe_group, "discover_group_apis", discover_group_apis)


# Bug, kind of history, and a seed that finds it. After a change of the simulator, the search continues from there.
PLANTED_BUGS = (
    (create_pods_without_their_pod_group, "gang_upgrades", 12),
    (share_one_pod_group, "gang_preemptions", 1),
    (keep_earlier_pod_groups, "gang_preemptions", 0),
    (delete_only_the_last_pod_group, "gang_upgrades", 138),
    (delete_pod_groups_while_pods_are_created, "gangs", 230),
    (create_pods_before_the_provider_is_recorded, "gang_upgrades", 0),
    (choose_the_provider_again, "gang_preemptions", 1),
    (count_preemptions_of_gangs_as_restarts, "gang_preemptions", 1),
    (ignore_the_dry_run, "gang_upgrades", 3),
    (create_the_dry_run_pod_under_its_name, "gangs", 95),
    (start_with_one_pod, "gang_preemptions", 2),
    (remember_that_the_cluster_has_no_provider, "gang_upgrades", 0),
)


@pytest.mark.parametrize(("plant_bug", "kind", "seed"), PLANTED_BUGS, ids=[bug.__name__ for bug, *_ in PLANTED_BUGS])
def test_search_finds_planted_bug(plant_bug: PlantBug, kind: str, seed: int) -> None:
    assert_search_finds(plant_bug, kind, seed)


def test_pods_start_one_by_one_if_the_dry_run_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_the_dry_run(monkeypatch)
    monkeypatch.setattr(GangMonitor, "_check_created_pod", lambda monitor, pod: None)
    histories = (
        run_history(SCENARIO_KINDS["gang_upgrades"](choices), choices) for choices in map(SeededChoices, range(52, 152))
    )

    assert any("runs although its gang was placed at" in str(history.violations) for history in histories)
