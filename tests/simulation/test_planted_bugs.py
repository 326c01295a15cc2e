"""Bugs planted one at a time, into the operator and into what it may rely on: the search finds each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from finetune_api import oom_repair as repair
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, Evidence
from finetune_operator.controller import controller
from finetune_operator.controller import reconcile as shell
from finetune_operator.controller.reconcile import Outcome, Pass, Seen
from finetune_operator.core import decide
from finetune_operator.core import ensure_children as upkeep
from finetune_operator.core import job_context as case
from finetune_operator.core import stop_attempt as ending
from finetune_operator.core.job_context import Case, Decision
from finetune_operator.core.pending import Wait
from finetune_operator.failures import evidence
from finetune_operator.failures import node_avoidance as avoid
from finetune_operator.failures import restart_budget as restarts
from finetune_operator.failures import rules as failure
from finetune_operator.failures.verdict import Verdict
from finetune_operator.kube import cluster
from finetune_operator.kube.cluster import KubernetesCluster, ObjectRef
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.plan import manifests
from finetune_operator.plan.run_plan import RunPlan
from testing.simulator import scenarios
from testing.simulator.incidents.job_incidents import Incident, suspended_for_a_while
from testing.simulator.incidents.node_incidents import crowded
from testing.simulator.incidents.user_interference import (
    config_map_deleted,
    made_again,
    quota_spent,
    relabelled,
    service_edited,
)
from testing.simulator.search import search
from testing.simulator.world.output_volume import Folder, Publication

HISTORIES = 1500  # at most until a bug must be found
Raw = dict[str, Any]
Plant = Callable[[pytest.MonkeyPatch], None]


def never_ask_for_a_fresh_list(patch: pytest.MonkeyPatch) -> None:
    """The cache is believed when it shows no pod."""
    patch.setattr(decide, "confirmed", lambda c, made: made)
    patch.setattr(ending, "confirmed", lambda c, made: made)


def take_absence_from_the_cache_for_loss(patch: pytest.MonkeyPatch) -> None:
    """A pod that a stale cache does not show counts as lost."""
    patch.setattr(decide, "confirmed", lambda c, made: case.confirmed(c, made) if made.actions else made)


def act_before_the_status_is_written(patch: pytest.MonkeyPatch) -> None:
    """The two steps of a pass in the wrong order."""

    async def reconcile(run: Pass, job: Raw, seen: Seen) -> Outcome:
        parsed = FineTuneJob.parse(job)
        observation = shell._observe(parsed, seen)
        if parsed.status.attempts:
            observation = await shell._look_closely(run, parsed, observation, seen)
        decision = decide.decide(parsed, observation, run.now(), run.settings)
        refusals = await shell._perform(run, parsed.metadata, decision.actions)
        following = FineTuneJob.parse({**job, "status": shell.render_status(decision.status)})
        ahead = decide.decide(following, replace(observation, fresh=True), run.now(), run.settings)
        await shell._perform(run, following.metadata, ahead.actions)
        if decision.status != parsed.status:
            job = await run.cluster.write_status(job, shell.render_status(decision.status))
        return Outcome(job, decision.requeue_after, refusals)

    patch.setattr(controller, "reconcile", reconcile)


def begin_while_older_pods_may_run(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the pods of the last attempt."""
    patch.setattr(NodeObservation, "may_run", lambda node, now: False)


def forget_what_was_spent(patch: pytest.MonkeyPatch) -> None:
    """Restarts are not counted."""

    def plan_restart(verdict: Any, ended: Any, earlier: Any, counts: Any, job: Any) -> restarts.Restart:
        return replace(restarts.plan_restart(verdict, ended, earlier, counts, job), counts=counts)

    patch.setattr(ending, "plan_restart", plan_restart)


def restart_after_success(patch: pytest.MonkeyPatch) -> None:
    """Exit 0 with a result counts as an end like any other."""
    patch.setattr(NodeObservation, "succeeded", property(lambda node: False))
    patch.setattr(failure, "_well", lambda evidence: False)


def report_suspended_too_early(patch: pytest.MonkeyPatch) -> None:
    """A pod that was asked to stop counts as stopped."""

    def running_pods(self: Case) -> list[NodeObservation]:
        return [node for node in self.seen.live() if node.may_run(self.now) and not node.deleting]

    patch.setattr(Case, "running_pods", running_pods)


def overwrite_a_newer_status(patch: pytest.MonkeyPatch) -> None:
    """The status is written whatever the job's version is by now."""
    write = KubernetesCluster.write_status

    async def write_status(self: KubernetesCluster, job: Raw, status: Raw) -> Raw:
        return await write(self, {**job, "metadata": {**job["metadata"], "resourceVersion": ""}}, status)

    patch.setattr(KubernetesCluster, "write_status", write_status)


def judge_on_the_first_evidence(patch: pytest.MonkeyPatch) -> None:
    """The first node that is seen to end is taken for the cause."""

    def stop(c: Case) -> Decision:
        return ending._judge(c, c.record) if c.record.reason in ("NodeFailed", "NodeDeleted") else ending_stop(c)

    ending_stop = ending.stop
    patch.setattr(decide, "stop", stop)


def go_on_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """A job that is suspended after its end is stopped once more."""
    real = decide._after_the_end

    def after_the_end(c: Case) -> Decision:
        return ending.begin_to_stop(c, ending.StopReason.SUSPENDED) if c.job.spec.suspend else real(c)

    patch.setattr(decide, "_after_the_end", after_the_end)


def wait_for_lost_kubelets(patch: pytest.MonkeyPatch) -> None:
    """A pod that is being deleted may run as long as it is there, even on a machine that was given up."""
    patch.setattr(NodeObservation, "may_run", lambda node, now: not node.ended)


def let_zombies_publish(patch: pytest.MonkeyPatch) -> None:
    """The trainer does not look whether a newer attempt has the lock."""

    def publish(folder: Folder, publication: Publication) -> None:
        folder.publications.append(publication)

    patch.setattr(Folder, "_publish", publish)


def let_attempts_meet(patch: pytest.MonkeyPatch) -> None:
    """The name of the rendezvous is the same for every attempt."""
    patch.setattr(RunPlan, "master_addr", property(lambda run: f"{run.job_name}-0.{run.service_name}"))


def blame_the_job_for_lost_machines(patch: pytest.MonkeyPatch) -> None:
    """Restarts after a lost machine count as any other."""
    patch.setattr(restarts, "UNCOUNTED", ())


def blame_a_node_that_was_never_made(patch: pytest.MonkeyPatch) -> None:
    """A pod that was not made yet when another was evicted is the cause."""

    def first(node: NodeObservation | None, rank: int, record: AttemptRecord) -> Evidence:
        return Evidence(node_rank=rank, ended=True) if node is None else real(node, rank, record)

    real = evidence._first
    patch.setattr(evidence, "_first", first)


def believe_all_that_hang(patch: pytest.MonkeyPatch) -> None:
    """A node that waited for another is taken for the one that stood still."""

    def hang(told: Evidence) -> Verdict | None:
        return real(told.model_copy(update={"victim": False}))

    real = failure.hang
    patch.setattr(failure, "RULES", tuple(hang if rule is real else rule for rule in failure.RULES))


def avoid_at_the_first_failure(patch: pytest.MonkeyPatch) -> None:
    """One lost connection, and a machine is never used again."""
    patch.setattr(avoid, "_STRIKES", 1)


def avoid_every_machine(patch: pytest.MonkeyPatch) -> None:
    """Whatever failed the job, it keeps away from all that it ever ran on."""
    patch.setattr(ending, "nodes_to_avoid", lambda attempts, now: tuple(f"gpu-{number}" for number in range(5)))


def forget_what_is_avoided(patch: pytest.MonkeyPatch) -> None:
    """The status says so, the pods do not."""
    patch.setattr(manifests, "keep_away", lambda affinity, nodes: affinity)


def stay_with_a_broken_gpu(patch: pytest.MonkeyPatch) -> None:
    """No machine is ever avoided."""
    patch.setattr(ending, "nodes_to_avoid", lambda attempts, now: ())


def release_for_good(patch: pytest.MonkeyPatch) -> None:
    """A job whose nodes did not all find room is not tried again."""

    def plan_restart(verdict: Any, *rest: Any) -> restarts.Restart:
        restart = restarts.plan_restart(verdict, *rest)
        return replace(restart, again=restart.again and verdict.reason is not Reason.GANG_INCOMPLETE)

    patch.setattr(ending, "plan_restart", plan_restart)


def hold_machines_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Nodes that run wait for others until they give up, which counts as a failure."""
    patch.setattr(Case, "release_time", property(lambda case: None))
    patch.setattr(decide, "_left_alone", lambda case: None)


def learn_from_less(patch: pytest.MonkeyPatch) -> None:
    """A smaller batch per GPU without more of them per step."""

    def smaller(shortage: repair.Shortage) -> Any:
        found = real(shortage)
        return found and (found[0].model_copy(update={"gradient_accumulation_steps": 1}), found[1])

    real = repair._smaller_micro_batches
    ladder = (smaller, *repair._LADDERS[Reason.CUDA_OUT_OF_MEMORY][1:])
    patch.setitem(repair._LADDERS, Reason.CUDA_OUT_OF_MEMORY, ladder)


def delete_what_is_somebody_elses(patch: pytest.MonkeyPatch) -> None:
    """A name is enough."""

    async def find(cluster: KubernetesCluster, target: ObjectRef) -> str | None:
        there = await cluster.get(target.kind, target.namespace, target.name)
        return str(there["metadata"]["uid"]) if there else None

    patch.setattr(KubernetesCluster, "_find_ours", find)


def take_a_namesakes_objects_for_somebody_elses(patch: pytest.MonkeyPatch) -> None:
    """What a deleted job of the same name left has the name for ever."""
    patch.setattr(cluster, "_full_name", lambda owner: (owner["uid"], "", ""))


def hold_machines_for_a_quota(patch: pytest.MonkeyPatch) -> None:
    """Nodes are released that wait for others without a place, but not for others that are refused."""
    patch.setattr(Wait, "for_ever", property(lambda wait: wait.reason == Reason.UNSCHEDULABLE))


def leave_what_people_delete(patch: pytest.MonkeyPatch) -> None:
    """A ConfigMap is made once, whatever becomes of it."""
    patch.setattr(upkeep, "build_config_map", manifests.build_service)


def wait_until_something_happens(patch: pytest.MonkeyPatch) -> None:
    """Nothing does to a pod that waits for a ConfigMap."""
    patch.setattr(decide, "next_look", lambda c: None)


def leave_what_people_edit(patch: pytest.MonkeyPatch) -> None:
    """A Service of the job is the job's Service."""
    patch.setattr(shell, "names_pods", lambda service, job_uid: True)


def forget_what_cannot_be_found(patch: pytest.MonkeyPatch) -> None:
    """A pod that is not found by its labels is gone."""
    patch.setattr(shell, "_missed", lambda job, listed: [])


def leave_what_cannot_be_found(patch: pytest.MonkeyPatch) -> None:
    """What has the name that it was to have is as good as made, though no watch tells of it."""
    patch.setattr(cluster, "is_labelled", lambda there: True)


PLANTED = (
    (never_ask_for_a_fresh_list, "stale_caches"),
    (take_absence_from_the_cache_for_loss, "operator_troubles"),
    (act_before_the_status_is_written, "anything"),
    (begin_while_older_pods_may_run, "anything"),
    (forget_what_was_spent, "anything"),
    (restart_after_success, "operator_troubles"),
    (report_suspended_too_early, "anything"),
    (overwrite_a_newer_status, "takeovers"),
    (judge_on_the_first_evidence, "failing_nodes"),
    (go_on_after_the_end, "anything"),
    (wait_for_lost_kubelets, "lost_machines"),
    (let_zombies_publish, "lost_machines"),
    (let_attempts_meet, "lost_machines"),
    (blame_the_job_for_lost_machines, "lost_machines"),
    (blame_a_node_that_was_never_made, "lost_machines"),
    (believe_all_that_hang, "failing_nodes"),
    (avoid_at_the_first_failure, "lost_machines"),
    (avoid_every_machine, "lost_machines"),
    (forget_what_is_avoided, "hard_times"),
    (stay_with_a_broken_gpu, "hard_times"),
    (release_for_good, "hard_times"),
    (hold_machines_for_ever, "hard_times"),
    (learn_from_less, "hard_times"),
    (delete_what_is_somebody_elses, "anything"),
)
MEDDLED: tuple[tuple[Plant, tuple[Incident, ...]], ...] = (
    (take_a_namesakes_objects_for_somebody_elses, (made_again,)),
    (hold_machines_for_a_quota, (quota_spent,)),
    (leave_what_people_delete, (config_map_deleted, quota_spent)),
    (wait_until_something_happens, (config_map_deleted, quota_spent)),
    (leave_what_people_edit, (service_edited, crowded)),
    (forget_what_cannot_be_found, (relabelled, suspended_for_a_while)),
    (leave_what_cannot_be_found, (relabelled,)),
)


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_bug_is_found(plant: Plant, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    assert search(kind, range(HISTORIES)).finding is not None


@pytest.mark.parametrize(("plant", "meddling"), MEDDLED, ids=[plant.__name__ for plant, _ in MEDDLED])
def test_so_is_one_where_people_meddle(
    plant: Plant, meddling: tuple[Incident, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "MEDDLING", meddling)
    plant(monkeypatch)

    assert search("meddling", range(HISTORIES)).finding is not None
