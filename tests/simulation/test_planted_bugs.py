"""Bugs planted one at a time into operator or trainer: the search of the simulator finds each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from finetune_api import oom_repair
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, Evidence
from finetune_operator import names
from finetune_operator.controller import controller, gather
from finetune_operator.controller.execute_actions import execute_actions
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.reconcile import PassDependencies, PassResult, render_status
from finetune_operator.core import attempt_record, deadlines, decide, ensure_children, stop_attempt
from finetune_operator.core.decision import Decision, require_confirmation
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.pending_reasons import PendingReason
from finetune_operator.failures import merge_evidence, node_avoidance, restart_budget, rules
from finetune_operator.failures.verdict import Verdict
from finetune_operator.kube import cluster
from finetune_operator.kube.cluster import KubernetesCluster, ObjectRef
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.plan import manifests, pod_manifest
from finetune_operator.plan.run_plan import RunPlan
from testing.simulator import scenarios
from testing.simulator.incidents.job_incidents import Incident, suspend_job_temporarily
from testing.simulator.incidents.node_incidents import occupy_k8s_nodes
from testing.simulator.incidents.user_interference import (
    delete_config_map,
    edit_labels,
    edit_service,
    exhaust_quota,
    recreate_job,
)
from testing.simulator.search import search
from testing.simulator.world.output_volume import Publication, SimulatedOutputFolder

MAX_HISTORIES = 1500  # within which a bug has to be found
RawBody = dict[str, Any]
PlantBug = Callable[[pytest.MonkeyPatch], None]


def skip_the_fresh_list(patch: pytest.MonkeyPatch) -> None:
    """Decisions based on absence are not confirmed by a fresh LIST."""
    patch.setattr(decide, "require_confirmation", lambda context, decision: decision)
    patch.setattr(stop_attempt, "require_confirmation", lambda context, decision: decision)


def treat_absence_in_the_cache_as_loss(patch: pytest.MonkeyPatch) -> None:
    """A pod missing in a stale cache counts as lost."""
    patch.setattr(
        decide,
        "require_confirmation",
        lambda context, decision: require_confirmation(context, decision) if decision.actions else decision,
    )


def act_before_the_status_write(patch: pytest.MonkeyPatch) -> None:
    """The actions of a pass precede its status write."""

    async def reconcile(run: PassDependencies, job: RawBody, cached: CachedState) -> PassResult:
        parsed = FineTuneJob.parse(job)
        observation = gather.observe_cached(parsed, cached)
        if parsed.status.attempts:
            observation = await gather.observe_uncached(run.cluster, parsed, observation, cached)
        decision = decide.decide(parsed, observation, run.now(), run.settings)
        rejected = await execute_actions(run.cluster, parsed.metadata, decision.actions, now=run.now())
        following = FineTuneJob.parse({**job, "status": render_status(decision.status)})
        ahead = decide.decide(following, replace(observation, fresh=True), run.now(), run.settings)
        await execute_actions(run.cluster, following.metadata, ahead.actions, now=run.now())
        if decision.status != parsed.status:
            job = await run.cluster.write_status(job, render_status(decision.status))
        return PassResult(job, decision.requeue_after, rejected)

    patch.setattr(controller, "reconcile", reconcile)


def start_while_older_pods_may_run(patch: pytest.MonkeyPatch) -> None:
    """An attempt begins without fencing the pods of the last one."""
    patch.setattr(NodeObservation, "may_run", lambda node, now: False)


def do_not_count_restarts(patch: pytest.MonkeyPatch) -> None:
    """Restarts do not use the budget."""

    def plan_restart(verdict: Any, ended: Any, earlier: Any, counts: Any, job: Any) -> restart_budget.RestartPlan:
        return replace(restart_budget.plan_restart(verdict, ended, earlier, counts, job), counts=counts)

    patch.setattr(stop_attempt, "plan_restart", plan_restart)


def restart_after_success(patch: pytest.MonkeyPatch) -> None:
    """A node that published its result counts as failed."""
    patch.setattr(NodeObservation, "succeeded", property(lambda node: False))
    patch.setattr(rules, "_has_succeeded", lambda evidence: False)


def report_suspended_too_early(patch: pytest.MonkeyPatch) -> None:
    """A terminating pod counts as stopped."""

    def running_pods(self: JobContext) -> list[NodeObservation]:
        return [node for node in self.observation.live_nodes() if node.may_run(self.now) and not node.deleting]

    patch.setattr(JobContext, "running_pods", running_pods)


def overwrite_a_newer_status(patch: pytest.MonkeyPatch) -> None:
    """The status is written without the resourceVersion of the job."""
    write = KubernetesCluster.write_status

    async def write_status(self: KubernetesCluster, job: RawBody, status: RawBody) -> RawBody:
        return await write(self, {**job, "metadata": {**job["metadata"], "resourceVersion": ""}}, status)

    patch.setattr(KubernetesCluster, "write_status", write_status)


def judge_on_the_first_evidence(patch: pytest.MonkeyPatch) -> None:
    """The node observed to end first is taken for the root cause."""

    def judge_at_once(context: JobContext) -> Decision:
        return (
            stop_attempt._judge(context, context.record)
            if context.record.reason in ("NodeFailed", "NodeDeleted")
            else original(context)
        )

    original = stop_attempt.continue_stopping
    patch.setattr(decide, "continue_stopping", judge_at_once)


def stop_a_finished_job(patch: pytest.MonkeyPatch) -> None:
    """A job suspended after its end is stopped again."""
    original = decide._clean_up_finished

    def clean_up_finished(context: JobContext) -> Decision:
        return (
            stop_attempt.begin_stopping(context, stop_attempt.StopReason.SUSPENDED)
            if context.job.spec.suspend
            else original(context)
        )

    patch.setattr(decide, "_clean_up_finished", clean_up_finished)


def never_fence_lost_pods(patch: pytest.MonkeyPatch) -> None:
    """A terminating pod may run as long as it exists, even on a lost Kubernetes node."""
    patch.setattr(NodeObservation, "may_run", lambda node, now: not node.ended)


def let_zombies_publish(patch: pytest.MonkeyPatch) -> None:
    """The trainer publishes without checking that no newer attempt has the lock."""

    def publish(folder: SimulatedOutputFolder, publication: Publication) -> None:
        folder.publications.append(publication)

    patch.setattr(SimulatedOutputFolder, "_publish", publish)


def share_the_rendezvous_name_between_attempts(patch: pytest.MonkeyPatch) -> None:
    """The rendezvous address is the same for every attempt."""
    patch.setattr(RunPlan, "master_addr", property(lambda run: f"{run.job_name}-0.{run.service_name}"))


def count_lost_k8s_nodes_against_the_job(patch: pytest.MonkeyPatch) -> None:
    """Restarts after the loss of a Kubernetes node use the budget of the job."""
    patch.setattr(restart_budget, "INFRASTRUCTURE_FAULTS", ())


def blame_a_node_never_created(patch: pytest.MonkeyPatch) -> None:
    """A pod not yet created when another was evicted is the root cause."""

    def initial(node: NodeObservation | None, rank: int, record: AttemptRecord) -> Evidence:
        return Evidence(node_rank=rank, ended=True) if node is None else original(node, rank, record)

    original = merge_evidence._initial
    patch.setattr(merge_evidence, "_initial", initial)


def treat_every_hang_as_root_cause(patch: pytest.MonkeyPatch) -> None:
    """A node that waited for a hanging one is taken for the root cause."""

    def hang(evidence_of_node: Evidence) -> Verdict | None:
        return original(evidence_of_node.model_copy(update={"victim": False}))

    original = rules.hang
    patch.setattr(rules, "RULES", tuple(hang if rule is original else rule for rule in rules.RULES))


def avoid_after_one_failure(patch: pytest.MonkeyPatch) -> None:
    """A Kubernetes node is avoided after one suspicious failure."""
    patch.setattr(node_avoidance, "_STRIKE_LIMIT", 1)


def avoid_every_k8s_node(patch: pytest.MonkeyPatch) -> None:
    """Every Kubernetes node is avoided after any failure."""
    patch.setattr(attempt_record, "nodes_to_avoid", lambda attempts, now: tuple(f"gpu-{number}" for number in range(5)))


def omit_avoidance_from_pods(patch: pytest.MonkeyPatch) -> None:
    """Avoided Kubernetes nodes are in the status but not in the affinity of the pods."""
    patch.setattr(pod_manifest, "exclude_nodes", lambda affinity, nodes: affinity)


def never_avoid_k8s_nodes(patch: pytest.MonkeyPatch) -> None:
    """No Kubernetes node is ever avoided."""
    patch.setattr(attempt_record, "nodes_to_avoid", lambda attempts, now: ())


def never_restart_released_nodes(patch: pytest.MonkeyPatch) -> None:
    """A job whose nodes could not all be scheduled is not restarted."""

    def plan_restart(verdict: Any, *others: Any) -> restart_budget.RestartPlan:
        restart = restart_budget.plan_restart(verdict, *others)
        return replace(restart, allowed=restart.allowed and verdict.reason is not Reason.GANG_INCOMPLETE)

    patch.setattr(stop_attempt, "plan_restart", plan_restart)


def never_release_running_nodes(patch: pytest.MonkeyPatch) -> None:
    """Running nodes wait for others until their rendezvous times out, which counts as a failure."""
    patch.setattr(deadlines, "release_time", lambda context: None)
    patch.setattr(decide, "_check_incomplete_gang", lambda context: None)


def halve_the_effective_batch(patch: pytest.MonkeyPatch) -> None:
    """The micro-batch is halved without more gradient accumulation."""

    def smaller(shortage: oom_repair.MemoryShortage) -> Any:
        chosen = original(shortage)
        return chosen and (chosen[0].model_copy(update={"gradient_accumulation_steps": 1}), chosen[1])

    original = oom_repair._reduce_micro_batch
    ladder = (smaller, *oom_repair._LADDERS[Reason.CUDA_OUT_OF_MEMORY][1:])
    patch.setitem(oom_repair._LADDERS, Reason.CUDA_OUT_OF_MEMORY, ladder)


def delete_foreign_objects(patch: pytest.MonkeyPatch) -> None:
    """Objects are identified by their name alone."""

    async def find(cluster: KubernetesCluster, target: ObjectRef) -> str | None:
        live = await cluster.get(target.kind, target.namespace, target.name)
        return str(live["metadata"]["uid"]) if live else None

    patch.setattr(KubernetesCluster, "_find_controlled_uid", find)


def treat_objects_of_a_predecessor_as_foreign(patch: pytest.MonkeyPatch) -> None:
    """Children of a deleted job of the same name count as foreign objects."""
    patch.setattr(cluster, "_group_kind_name", lambda owner: (owner["uid"], "", ""))


def hold_nodes_during_quota_errors(patch: pytest.MonkeyPatch) -> None:
    """Running nodes are released when others are unschedulable, but not when their create is rejected."""
    patch.setattr(PendingReason, "has_no_timeout", property(lambda pending: pending.reason == Reason.UNSCHEDULABLE))


def never_recreate_the_config_map(patch: pytest.MonkeyPatch) -> None:
    """A deleted ConfigMap is not created again."""
    patch.setattr(ensure_children, "build_config_map", manifests.build_service)


def share_the_config_map_name_between_jobs(patch: pytest.MonkeyPatch) -> None:
    """The name of a ConfigMap does not contain the uid of the job."""
    patch.setattr(names, "config_map_name", lambda job_name, job_uid, attempt: f"{job_name}-{attempt}")


def never_check_the_config_map(patch: pytest.MonkeyPatch) -> None:
    """A pod that waits for its ConfigMap does not requeue the job."""
    patch.setattr(decide, "next_config_map_check", lambda context: None)


def ignore_edited_services(patch: pytest.MonkeyPatch) -> None:
    """An edited Service counts as intact."""
    patch.setattr(gather, "is_intact_headless_service", lambda service, job_uid: True)


def ignore_unlisted_pods(patch: pytest.MonkeyPatch) -> None:
    """A pod without the job label counts as gone."""
    patch.setattr(gather, "_unlisted_pod_names", lambda job, listed: [])


def accept_relabelled_pods(patch: pytest.MonkeyPatch) -> None:
    """An existing pod without the job label counts as created."""
    patch.setattr(cluster, "has_job_label", lambda live: True)


PLANTED = (
    (skip_the_fresh_list, "stale_caches"),
    (treat_absence_in_the_cache_as_loss, "operator_faults"),
    (act_before_the_status_write, "all_faults"),
    (start_while_older_pods_may_run, "all_faults"),
    (do_not_count_restarts, "all_faults"),
    (restart_after_success, "operator_faults"),
    (report_suspended_too_early, "all_faults"),
    (overwrite_a_newer_status, "split_brain"),
    (judge_on_the_first_evidence, "failing_job_nodes"),
    (stop_a_finished_job, "all_faults"),
    (never_fence_lost_pods, "lost_k8s_nodes"),
    (let_zombies_publish, "lost_k8s_nodes"),
    (share_the_rendezvous_name_between_attempts, "lost_k8s_nodes"),
    (count_lost_k8s_nodes_against_the_job, "lost_k8s_nodes"),
    (blame_a_node_never_created, "lost_k8s_nodes"),
    (treat_every_hang_as_root_cause, "failing_job_nodes"),
    (avoid_after_one_failure, "lost_k8s_nodes"),
    (avoid_every_k8s_node, "lost_k8s_nodes"),
    (omit_avoidance_from_pods, "resource_faults"),
    (never_avoid_k8s_nodes, "resource_faults"),
    (never_restart_released_nodes, "resource_faults"),
    (never_release_running_nodes, "resource_faults"),
    (halve_the_effective_batch, "resource_faults"),
    (delete_foreign_objects, "all_faults"),
)
PLANTED_FOR_INTERFERENCE: tuple[tuple[PlantBug, tuple[Incident, ...]], ...] = (
    (treat_objects_of_a_predecessor_as_foreign, (recreate_job,)),
    (hold_nodes_during_quota_errors, (exhaust_quota,)),
    (never_recreate_the_config_map, (delete_config_map, exhaust_quota)),
    (share_the_config_map_name_between_jobs, (recreate_job,)),
    (never_check_the_config_map, (delete_config_map, exhaust_quota)),
    (ignore_edited_services, (edit_service, occupy_k8s_nodes)),
    (ignore_unlisted_pods, (edit_labels, suspend_job_temporarily)),
    (accept_relabelled_pods, (edit_labels,)),
)


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_the_search_finds_a_planted_bug(plant: PlantBug, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    assert search(kind, range(MAX_HISTORIES)).counterexample is not None


@pytest.mark.parametrize(
    ("plant", "incidents"), PLANTED_FOR_INTERFERENCE, ids=[plant.__name__ for plant, _ in PLANTED_FOR_INTERFERENCE]
)
def test_the_search_finds_a_planted_bug_under_user_interference(
    plant: PlantBug, incidents: tuple[Incident, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "USER_INTERFERENCE", incidents)
    plant(monkeypatch)

    assert search("user_interference", range(MAX_HISTORIES)).counterexample is not None
