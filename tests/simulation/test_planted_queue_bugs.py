"""Tests that the simulator finds bugs by which jobs lose, keep or exceed the quota of Kueue."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.reasons import Reason
from finetune_operator import names
from finetune_operator.controller.orphans import OrphanSweeper
from finetune_operator.core import decide, degraded, queue_group, stop_attempt, suspend_and_resume
from finetune_operator.core.actions import Action, DeletePod, DeleteWorkload
from finetune_operator.core.decision import Decision
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.pending_reasons import PendingReason
from finetune_operator.failures import restart_budget
from finetune_operator.observation import read_evidence
from finetune_operator.plan import pod_group, pod_manifest, pod_placement
from finetune_operator.plan.pod_group import GroupFields
from finetune_operator.plan.run_plan import RunPlan
from testing.simulator.history import run_history
from testing.simulator.planted_bugs import PlantBug, assert_search_finds
from testing.simulator.queue_invariants import QueueMonitor
from testing.simulator.scenarios import SCENARIO_KINDS
from testing.simulator.world.choices import SeededChoices

GROUP_LABEL = f"{names.KUEUE_PREFIX}pod-group-name"


def use_a_new_group_per_attempt(patch: pytest.MonkeyPatch) -> None:
    """Queue each attempt as a new group, behind the jobs that wait."""

    def build_group_fields(run_plan: RunPlan) -> GroupFields:
        fields = original(run_plan)
        group = fields.labels.get(GROUP_LABEL)
        return (
            replace(fields, labels={**fields.labels, GROUP_LABEL: f"{group}-{run_plan.attempt}"}) if group else fields
        )

    original = pod_group.build_group_fields
    patch.setattr(pod_manifest, "build_group_fields", build_group_fields)


def keep_the_quota_of_suspended_jobs(patch: pytest.MonkeyPatch) -> None:
    """Do not delete the Workload of a suspended job."""

    def keep_job_suspended(context: JobContext) -> Decision:
        decision = original(context)
        return replace(decision, actions=tuple(a for a in decision.actions if not isinstance(a, DeleteWorkload)))

    original = suspend_and_resume.keep_job_suspended
    patch.setattr(decide, "keep_job_suspended", keep_job_suspended)


def keep_the_quota_of_deleted_jobs(patch: pytest.MonkeyPatch) -> None:
    """Do not delete the Workload of a deleted job."""

    async def release_quota(self: OrphanSweeper) -> None:
        """Do nothing."""

    patch.setattr(OrphanSweeper, "release_quota", release_quota)


def keep_the_quota_of_unreadable_jobs(patch: pytest.MonkeyPatch) -> None:
    """Do not delete the Workload of a job that the operator cannot reconcile."""
    patch.setattr(degraded, "_release_quota", lambda job, pods: ())


def keep_the_quota_in_foreground_deletion(patch: pytest.MonkeyPatch) -> None:
    """Leave a job that is being deleted to the garbage collector."""

    def release_quota(self: JobContext) -> tuple[Action, ...]:
        return () if self.job.metadata.deletion_timestamp else original(self)

    original = JobContext.release_quota
    patch.setattr(JobContext, "release_quota", release_quota)


def return_the_quota_at_every_restart(patch: pytest.MonkeyPatch) -> None:
    """Leave the group although Kueue would accept the pods of the next attempt."""
    patch.setattr(queue_group, "_differs_from_last_attempt", lambda context: True)


def return_the_quota_of_running_pods(patch: pytest.MonkeyPatch) -> None:
    """Delete the Workload while pods of the job save their checkpoints."""

    def release_quota(self: JobContext) -> tuple[Action, ...]:
        is_held = any(node.is_held_by_kueue for node in self.observation.live_nodes())
        return self.delete_workload() if is_held else ()

    def continue_stopping(context: JobContext) -> Decision:
        decision = original(context)
        return replace(decision, actions=(*decision.actions, *release_quota(context)))

    original = stop_attempt.continue_stopping
    patch.setattr(decide, "continue_stopping", continue_stopping)
    patch.setattr(JobContext, "release_quota", release_quota)


def run_without_kueue(patch: pytest.MonkeyPatch) -> None:
    """Omit the labels of the queue, and ignore that Kueue does not manage the pods."""
    patch.setattr(pod_manifest, "build_group_fields", lambda run_plan: GroupFields())
    patch.setattr(decide, "check_group", lambda context: None)


def stay_in_the_group_after_a_repair(patch: pytest.MonkeyPatch) -> None:
    """Create pods that avoid Kubernetes nodes, or were changed by a user, in the group of other pods."""
    patch.setattr(queue_group, "_differs_from_last_attempt", lambda context: False)


def recreate_pods_while_old_ones_end(patch: pytest.MonkeyPatch) -> None:
    """Create the pods of the next attempt before Kueue replaces those of the last one."""
    patch.setattr(decide, "prepare_queue_group", lambda context, older_pods: None)


def keep_pods_of_lost_nodes_in_the_group(patch: pytest.MonkeyPatch) -> None:
    """Delete the Workload without the pods that Kueue counts as running."""

    def release_quota(self: JobContext) -> tuple[Action, ...]:
        return tuple(action for action in original(self) if not isinstance(action, DeletePod))

    original = JobContext.release_quota
    patch.setattr(JobContext, "release_quota", release_quota)


def select_spread_pods_by_attempt(patch: pytest.MonkeyPatch) -> None:
    """Give the pods of each attempt another spread constraint, so that Kueue does not replace pods."""

    def select_pods_to_spread(run_plan: RunPlan) -> dict[str, str]:
        return {names.JOB_UID: run_plan.job_uid, names.ATTEMPT: str(run_plan.attempt)}

    patch.setattr(pod_placement, "select_pods_to_spread", select_pods_to_spread)


def count_preemptions_as_restarts(patch: pytest.MonkeyPatch) -> None:
    """Charge a preemption to the restart budget although Kueue names the preemptor."""

    def plan_restart(verdict: Any, *arguments: Any) -> restart_budget.RestartPlan:
        record, earlier, counts, limits = arguments
        limits = replace(limits, starts_as_group=False)
        return restart_budget.plan_restart(replace(verdict, preemptor=""), record, earlier, counts, limits)

    patch.setattr(stop_attempt, "plan_restart", plan_restart)


def count_deactivations_as_restarts(patch: pytest.MonkeyPatch) -> None:
    """Charge the deactivation of a Workload to the restart budget."""

    def plan_restart(*arguments: Any) -> restart_budget.RestartPlan:
        verdict, record, earlier, counts, limits = arguments
        return restart_budget.plan_restart(verdict, record, earlier, counts, replace(limits, starts_as_group=False))

    patch.setattr(stop_attempt, "plan_restart", plan_restart)


def forget_preemptors(patch: pytest.MonkeyPatch) -> None:
    """Do not read the preemptor from the condition of a pod."""
    patch.setattr(read_evidence, "_find_preemptor", lambda message: "")


def time_out_gated_pods(patch: pytest.MonkeyPatch) -> None:
    """Fail a job that waits in the queue for three minutes."""

    def get_timeout(reason: PendingReason) -> timedelta | None:
        return timedelta(minutes=3) if reason.reason == Reason.WAITING_IN_QUEUE else original(reason)

    original = PendingReason.timeout.fget  # type: ignore[attr-defined]
    patch.setattr(PendingReason, "timeout", property(get_timeout))


# Bug, kind of history, and a seed that finds it. After a change of the simulator, the search continues from there.
PLANTED_BUGS = (
    (use_a_new_group_per_attempt, "queued_jobs", 0),
    (keep_the_quota_of_suspended_jobs, "queue_pauses", 26),
    (keep_the_quota_of_deleted_jobs, "queued_jobs", 49),
    (keep_the_quota_of_unreadable_jobs, "queued_jobs", 164),
    (keep_the_quota_in_foreground_deletion, "queue_pauses", 23),
    (return_the_quota_at_every_restart, "queue_preemptions", 1),
    (return_the_quota_of_running_pods, "queue_preemptions", 1),
    (run_without_kueue, "queue_preemptions", 0),
    (stay_in_the_group_after_a_repair, "queued_jobs", 118),
    (recreate_pods_while_old_ones_end, "queue_preemptions", 3),
    (keep_pods_of_lost_nodes_in_the_group, "queued_jobs", 16),
    (select_spread_pods_by_attempt, "queue_preemptions", 1),
    (count_preemptions_as_restarts, "queue_preemptions", 1),
    (count_deactivations_as_restarts, "queue_preemptions", 23),
    (forget_preemptors, "queue_preemptions", 1),
    (time_out_gated_pods, "queue_preemptions", 1),
)


@pytest.mark.parametrize(("plant_bug", "kind", "seed"), PLANTED_BUGS, ids=[bug.__name__ for bug, *_ in PLANTED_BUGS])
def test_search_finds_planted_bug(plant_bug: PlantBug, kind: str, seed: int) -> None:
    assert_search_finds(plant_bug, kind, seed)


def test_quota_is_exceeded_if_it_is_returned_while_pods_run(monkeypatch: pytest.MonkeyPatch) -> None:
    return_the_quota_of_running_pods(monkeypatch)
    monkeypatch.setattr(QueueMonitor, "_check_return", lambda monitor, workload: None)
    histories = (
        run_history(SCENARIO_KINDS["queue_pauses"](choices), choices) for choices in map(SeededChoices, range(100))
    )

    assert any("the quota of 4 pods is exceeded by" in str(history.violations) for history in histories)
