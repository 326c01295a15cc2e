"""Tests that the simulator finds bugs that are planted into the operator or the trainer."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_api import oom_repair
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, Evidence, Progress
from finetune_operator import names
from finetune_operator.controller import controller, gather, reconcile
from finetune_operator.controller.execute_actions import execute_actions
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.progress_poller import ProgressPoller
from finetune_operator.controller.reconcile import PassDependencies, PassResult, render_status
from finetune_operator.core import attempt_record, deadlines, decide, ensure_children, stop_attempt
from finetune_operator.core.decision import Decision, require_confirmation
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.pending_reasons import PendingReason
from finetune_operator.core.suspend_and_resume import keep_job_suspended
from finetune_operator.failures import merge_evidence, node_avoidance, restart_budget, rules
from finetune_operator.failures.verdict import Verdict
from finetune_operator.kube import cluster
from finetune_operator.kube.cluster import KubernetesCluster, ObjectRef
from finetune_operator.observation.ownership import JobOwner
from finetune_operator.observation.ownership import find_owning_job as find_job
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.plan import manifests, pod_manifest
from finetune_operator.plan.run_plan import RunPlan
from testing.simulator import scenarios
from testing.simulator.attempt_invariants import AttemptMonitor
from testing.simulator.incidents.job_incidents import Incident, delete_pod, suspend_job_temporarily
from testing.simulator.incidents.node_incidents import occupy_k8s_nodes
from testing.simulator.incidents.user_interference import (
    delete_config_map,
    edit_labels,
    edit_service,
    exhaust_quota,
    recreate_job,
)
from testing.simulator.planted_bugs import PlantBug, assert_search_finds
from testing.simulator.search import search
from testing.simulator.world.output_volume import Publication, SimulatedOutputFolder

RawBody = dict[str, Any]


def skip_fresh_list(patch: pytest.MonkeyPatch) -> None:
    """Skip the fresh LIST that confirms decisions based on missing objects."""
    patch.setattr(decide, "require_confirmation", lambda context, decision: decision)
    patch.setattr(stop_attempt, "require_confirmation", lambda context, decision: decision)


def treat_pod_missing_in_cache_as_lost(patch: pytest.MonkeyPatch) -> None:
    """Treat a pod that is missing in a stale cache as lost."""
    patch.setattr(
        decide,
        "require_confirmation",
        lambda context, decision: require_confirmation(context, decision) if decision.actions else decision,
    )


def act_before_status_write(patch: pytest.MonkeyPatch) -> None:
    """Execute the actions of a pass before its status write."""

    async def reconcile(run: PassDependencies, job: RawBody, cached: CachedState) -> PassResult:
        parsed = FineTuneJob.parse(job)
        observation = gather.observe_cached(parsed, cached)
        if parsed.status.attempts:
            observation = await gather.observe_uncached(run.cluster, parsed, observation, cached)
        decision = decide.decide(parsed, observation, run.now(), run.settings)
        creations = await execute_actions(run.cluster, parsed.metadata, decision.actions, now=run.now())
        following = FineTuneJob.parse({**job, "status": render_status(decision.status)})
        ahead = decide.decide(following, replace(observation, is_fresh=True), run.now(), run.settings)
        await execute_actions(run.cluster, following.metadata, ahead.actions, now=run.now())
        if decision.status != parsed.status:
            job = await run.cluster.write_status(job, render_status(decision.status))
        return PassResult(job, decision.requeue_after, creations.rejected)

    patch.setattr(controller, "reconcile", reconcile)


def skip_fencing_of_older_pods(patch: pytest.MonkeyPatch) -> None:
    """Start an attempt without fencing the pods of the previous one."""
    patch.setattr(NodeObservation, "may_run", lambda node, now: False)


def never_count_restarts(patch: pytest.MonkeyPatch) -> None:
    """Do not charge restarts to the restart budget."""

    def plan_restart(
        verdict: Any, failed_attempt: Any, earlier_attempts: Any, counts: Any, job: Any
    ) -> restart_budget.RestartPlan:
        return replace(
            restart_budget.plan_restart(verdict, failed_attempt, earlier_attempts, counts, job), counts=counts
        )

    patch.setattr(stop_attempt, "plan_restart", plan_restart)


def restart_after_success(patch: pytest.MonkeyPatch) -> None:
    """Treat a node that published its result as failed."""
    patch.setattr(NodeObservation, "has_succeeded", property(lambda node: False))
    patch.setattr(rules, "has_succeeded", lambda evidence: False)


def report_suspended_too_early(patch: pytest.MonkeyPatch) -> None:
    """Treat a terminating pod as stopped."""

    def running_pods(self: JobContext) -> list[NodeObservation]:
        return [node for node in self.observation.live_nodes() if node.may_run(self.now) and not node.is_terminating]

    patch.setattr(JobContext, "running_pods", running_pods)


def overwrite_newer_status(patch: pytest.MonkeyPatch) -> None:
    """Write the status without the resourceVersion of the job."""
    write = KubernetesCluster.write_status

    async def write_status(self: KubernetesCluster, job: RawBody, status: RawBody) -> RawBody:
        return await write(self, {**job, "metadata": {**job["metadata"], "resourceVersion": ""}}, status)

    patch.setattr(KubernetesCluster, "write_status", write_status)


def judge_on_first_evidence(patch: pytest.MonkeyPatch) -> None:
    """Treat the first node that is observed to have terminated as the root cause."""

    def judge_immediately(context: JobContext) -> Decision:
        return (
            stop_attempt._judge_attempt(context, context.record)
            if context.record.reason in ("NodeFailed", "NodeDeleted")
            else original(context)
        )

    original = stop_attempt.continue_stopping
    patch.setattr(decide, "continue_stopping", judge_immediately)


def stop_finished_job(patch: pytest.MonkeyPatch) -> None:
    """Stop a finished job again if it is suspended."""
    original = decide._clean_up_finished_job

    def clean_up_finished(context: JobContext) -> Decision:
        return (
            stop_attempt.begin_stopping(context, stop_attempt.StopReason.SUSPENDED)
            if context.job.spec.suspend
            else original(context)
        )

    patch.setattr(decide, "_clean_up_finished_job", clean_up_finished)


def never_fence_lost_pods(patch: pytest.MonkeyPatch) -> None:
    """Assume that a terminating pod on a lost Kubernetes node may run until its object is removed."""
    patch.setattr(NodeObservation, "may_run", lambda node, now: not node.has_ended)


def let_zombies_publish(patch: pytest.MonkeyPatch) -> None:
    """Make the trainer publish without checking whether a newer attempt holds the lock."""

    def publish(folder: SimulatedOutputFolder, publication: Publication) -> None:
        folder.publications.append(publication)

    patch.setattr(SimulatedOutputFolder, "_publish", publish)


def share_rendezvous_address_between_attempts(patch: pytest.MonkeyPatch) -> None:
    """Use the same rendezvous address for every attempt."""
    patch.setattr(RunPlan, "master_addr", property(lambda run: f"{run.job_name}-0.{run.service_name}"))


def charge_lost_k8s_nodes_to_job_budget(patch: pytest.MonkeyPatch) -> None:
    """Charge restarts after the loss of a Kubernetes node to the budget of the job."""
    patch.setattr(restart_budget, "INFRASTRUCTURE_FAULTS", ())


def charge_preemptions_to_job_budget(patch: pytest.MonkeyPatch) -> None:
    """Do not read evictions by Kueue, so that its preemptions count as deleted pods."""
    patch.setattr(rules, "RULES", tuple(rule for rule in rules.RULES if rule is not rules.evicted_by_kueue))


def blame_uncreated_pod(patch: pytest.MonkeyPatch) -> None:
    """Treat a pod that was never created as the root cause, although another pod was evicted."""

    def build_initial_evidence(node: NodeObservation | None, rank: int, record: AttemptRecord) -> Evidence:
        return Evidence(node_rank=rank, ended=True) if node is None else original(node, rank, record)

    original = merge_evidence._build_initial_evidence
    patch.setattr(merge_evidence, "_build_initial_evidence", build_initial_evidence)


def treat_every_hang_as_root_cause(patch: pytest.MonkeyPatch) -> None:
    """Treat a node that waited for a hanging node as the root cause."""

    def rank_hung(node_evidence: Evidence) -> Verdict | None:
        return original(node_evidence.model_copy(update={"victim": False}))

    original = rules.rank_hung
    patch.setattr(rules, "RULES", tuple(rank_hung if rule is original else rule for rule in rules.RULES))


def avoid_k8s_node_after_one_failure(patch: pytest.MonkeyPatch) -> None:
    """Avoid a Kubernetes node after its first suspicious failure."""
    patch.setattr(node_avoidance, "_STRIKE_LIMIT", 1)


def avoid_every_k8s_node(patch: pytest.MonkeyPatch) -> None:
    """Avoid all Kubernetes nodes after any failure."""
    patch.setattr(
        attempt_record, "find_nodes_to_avoid", lambda attempts, now: tuple(f"gpu-{number}" for number in range(5))
    )


def omit_avoidance_from_pods(patch: pytest.MonkeyPatch) -> None:
    """Omit avoided Kubernetes nodes from the affinity of the pods, but not from the status."""
    patch.setattr(pod_manifest, "exclude_nodes", lambda affinity, nodes: affinity)


def never_avoid_k8s_nodes(patch: pytest.MonkeyPatch) -> None:
    """Never avoid a Kubernetes node."""
    patch.setattr(attempt_record, "find_nodes_to_avoid", lambda attempts, now: ())


def never_restart_incomplete_gangs(patch: pytest.MonkeyPatch) -> None:
    """Fail a job instead of restarting it if some of its nodes could not be scheduled."""

    def plan_restart(verdict: Any, *arguments: Any) -> restart_budget.RestartPlan:
        restart = restart_budget.plan_restart(verdict, *arguments)
        return replace(restart, is_allowed=restart.is_allowed and verdict.reason is not Reason.GANG_INCOMPLETE)

    patch.setattr(stop_attempt, "plan_restart", plan_restart)


def never_release_running_nodes(patch: pytest.MonkeyPatch) -> None:
    """Make running nodes wait until their rendezvous times out and the attempt fails."""
    patch.setattr(deadlines, "release_time", lambda context: None)
    patch.setattr(decide, "_check_incomplete_gang", lambda context: None)


def halve_the_effective_batch(patch: pytest.MonkeyPatch) -> None:
    """Halve the micro-batch without doubling the gradient accumulation."""

    def reduce_micro_batch(shortage: oom_repair.MemoryShortage) -> Any:
        chosen = original(shortage)
        return chosen and (chosen[0].model_copy(update={"gradient_accumulation_steps": 1}), chosen[1])

    original = oom_repair._reduce_micro_batch
    ladder = (reduce_micro_batch, *oom_repair._REPAIR_STEPS[Reason.CUDA_OUT_OF_MEMORY][1:])
    patch.setitem(oom_repair._REPAIR_STEPS, Reason.CUDA_OUT_OF_MEMORY, ladder)


def delete_foreign_objects(patch: pytest.MonkeyPatch) -> None:
    """Identify objects only by name, so that foreign objects are deleted."""

    async def find_uid(cluster: KubernetesCluster, target: ObjectRef) -> str | None:
        live = await cluster.get(target.kind, target.namespace, target.name)
        return str(live["metadata"]["uid"]) if live else None

    patch.setattr(KubernetesCluster, "_find_controlled_uid", find_uid)


def treat_predecessor_objects_as_foreign(patch: pytest.MonkeyPatch) -> None:
    """Treat children of a deleted job with the same name as foreign objects."""

    def find_owning_job(child: RawBody) -> JobOwner | None:
        owner = find_job(child)
        return None if owner is None else JobOwner(owner.uid, owner.uid)

    patch.setattr(cluster, "find_owning_job", find_owning_job)


def keep_nodes_during_quota_errors(patch: pytest.MonkeyPatch) -> None:
    """Keep running nodes when the creation of other pods is rejected."""
    patch.setattr(PendingReason, "has_no_timeout", property(lambda pending: pending.reason == Reason.UNSCHEDULABLE))


def never_recreate_config_map(patch: pytest.MonkeyPatch) -> None:
    """Do not recreate a deleted ConfigMap."""
    patch.setattr(ensure_children, "build_config_map", manifests.build_service)


def share_config_map_name_between_jobs(patch: pytest.MonkeyPatch) -> None:
    """Omit the job uid from the names of ConfigMaps."""
    patch.setattr(names, "config_map_name", lambda job_name, job_uid, attempt: f"{job_name}-{attempt}")


def never_check_config_map(patch: pytest.MonkeyPatch) -> None:
    """Do not requeue the job while a pod waits for its ConfigMap."""
    patch.setattr(decide, "compute_config_map_check_delay", lambda context: None)


def ignore_edited_services(patch: pytest.MonkeyPatch) -> None:
    """Treat an edited Service as intact."""
    patch.setattr(gather, "is_intact_headless_service", lambda service, job_uid: True)


def ignore_unlisted_pods(patch: pytest.MonkeyPatch) -> None:
    """Treat a pod without the job label as gone."""
    patch.setattr(gather, "_find_unlisted_pod_names", lambda job, listed: [])


def accept_relabelled_pods(patch: pytest.MonkeyPatch) -> None:
    """Treat an existing pod without the job label as created."""
    patch.setattr(cluster, "has_job_label", lambda live: True)


def delete_pods_of_newer_attempts(patch: pytest.MonkeyPatch) -> None:
    """Delete pods of attempts that another operator began, without reading the job again."""
    patch.setattr(reconcile, "_deletes_pod_of_newer_attempt", lambda job, decision, observation: False)


def ignore_cancellation_of_suspended_jobs(patch: pytest.MonkeyPatch) -> None:
    """Keep a suspended job although it is cancelled."""
    patch.setattr(decide, "cancel_job", lambda context, _record: keep_job_suspended(context))


def forge_polled_progress(patch: pytest.MonkeyPatch) -> None:
    """Forge the response to each poll of the progress; the status may then report steps that no process passed."""
    forged = Progress(step=10**9, first_step=10**9, per_device_train_batch_size=64)
    patch.setattr(AttemptMonitor, "_check_progress", lambda monitor, job: None)
    patch.setattr(ProgressPoller, "get_latest_progress", lambda poller, key: forged)


def renew_budget_by_polled_steps(patch: pytest.MonkeyPatch) -> None:
    """Use polled steps, which are forged, as progress for the restart budget."""

    def plan_restart(verdict: Any, failed_attempt: AttemptRecord, *arguments: Any) -> restart_budget.RestartPlan:
        evidence = tuple(
            each.model_copy(update={"last_step": failed_attempt.last_step}) for each in failed_attempt.evidence
        )
        failed_attempt = failed_attempt.model_copy(update={"evidence": evidence})
        return restart_budget.plan_restart(verdict, failed_attempt, *arguments)

    forge_polled_progress(patch)
    patch.setattr(stop_attempt, "plan_restart", plan_restart)


# Bug, kind of history, and a seed that finds it. After a change of the simulator, the search continues from there.
PLANTED_BUGS = (
    (skip_fresh_list, "stale_caches", 19),
    (treat_pod_missing_in_cache_as_lost, "operator_faults", 21),
    (act_before_status_write, "all_faults", 1),
    (skip_fencing_of_older_pods, "all_faults", 9),
    (never_count_restarts, "all_faults", 7),
    (restart_after_success, "operator_faults", 0),
    (report_suspended_too_early, "all_faults", 8),
    (overwrite_newer_status, "split_brain", 10),
    (delete_pods_of_newer_attempts, "resource_faults", 3948),
    (judge_on_first_evidence, "failing_job_nodes", 26),
    (stop_finished_job, "all_faults", 18),
    (never_fence_lost_pods, "lost_k8s_nodes", 6),
    (let_zombies_publish, "lost_k8s_nodes", 3),
    (share_rendezvous_address_between_attempts, "lost_k8s_nodes", 3),
    (charge_lost_k8s_nodes_to_job_budget, "lost_k8s_nodes", 0),
    (blame_uncreated_pod, "lost_k8s_nodes", 31),
    (treat_every_hang_as_root_cause, "failing_job_nodes", 459),
    (avoid_k8s_node_after_one_failure, "lost_k8s_nodes", 5),
    (avoid_every_k8s_node, "lost_k8s_nodes", 0),
    (omit_avoidance_from_pods, "resource_faults", 17),
    (never_avoid_k8s_nodes, "resource_faults", 17),
    (never_restart_incomplete_gangs, "resource_faults", 26),
    (never_release_running_nodes, "resource_faults", 929),
    (halve_the_effective_batch, "resource_faults", 53),
    (delete_foreign_objects, "all_faults", 657),
    (charge_preemptions_to_job_budget, "preemptions", 0),
    (ignore_cancellation_of_suspended_jobs, "cancellations", 1),
    (renew_budget_by_polled_steps, "failing_job_nodes", 6),
)
INTERFERENCE_BUGS: tuple[tuple[PlantBug, tuple[Incident, ...], int], ...] = (
    (treat_predecessor_objects_as_foreign, (recreate_job,), 16),
    (keep_nodes_during_quota_errors, (exhaust_quota, delete_pod), 13),
    (never_recreate_config_map, (delete_config_map, exhaust_quota), 1),
    (share_config_map_name_between_jobs, (recreate_job,), 1180),
    (never_check_config_map, (delete_config_map, exhaust_quota), 10),
    (ignore_edited_services, (edit_service, occupy_k8s_nodes), 422),
    (ignore_unlisted_pods, (edit_labels, suspend_job_temporarily), 5),
    (accept_relabelled_pods, (edit_labels, delete_pod), 1962),
)


@pytest.mark.parametrize(("plant_bug", "kind", "seed"), PLANTED_BUGS, ids=[bug.__name__ for bug, *_ in PLANTED_BUGS])
def test_search_finds_planted_bug(plant_bug: PlantBug, kind: str, seed: int) -> None:
    assert_search_finds(plant_bug, kind, seed)


@pytest.mark.parametrize("kind", ["failing_job_nodes", "lost_k8s_nodes", "resource_faults"])
def test_forged_progress_violates_no_invariant(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forge_polled_progress(monkeypatch)

    assert search(kind, range(60)).counterexample is None


@pytest.mark.parametrize(
    ("plant_bug", "incidents", "seed"), INTERFERENCE_BUGS, ids=[bug.__name__ for bug, *_ in INTERFERENCE_BUGS]
)
def test_search_finds_planted_bug_under_user_interference(
    plant_bug: PlantBug, incidents: tuple[Incident, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "USER_INTERFERENCE", incidents)

    assert_search_finds(plant_bug, "user_interference", seed)
