"""Tests that the simulator finds bugs by which jobs, releases or paused operators affect other jobs."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.recorded_defaults import render_defaults
from finetune_api.v1alpha1.status import JobSnapshot
from finetune_operator import names
from finetune_operator.controller import child_cache, gather, progress_poller, reconcile
from finetune_operator.controller.child_cache import ChildCache, JobKey
from finetune_operator.controller.controller import Controller
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.core import attempt_record, decide, ensure_children
from finetune_operator.core.decision import Decision
from finetune_operator.core.snapshot import renew_snapshot
from finetune_operator.kube.cluster import KubernetesCluster, ObjectRef
from finetune_operator.manager.leader_election import RETRY_PERIOD_SECONDS, LeaderElection
from finetune_operator.observation.ownership import JobOwner, RawBody, find_controlling_owner, select_children
from finetune_operator.observation.pod_identity import PodIdentities
from finetune_operator.observation.pods import NodeObservation, Observation, observe_pods
from finetune_operator.settings import Settings
from testing.simulator.history import Scenario, Trigger, run_history
from testing.simulator.incidents.job_incidents import edit_job_under_brief_suspension
from testing.simulator.incidents.user_interference import exhaust_quota
from testing.simulator.planted_bugs import MAX_HISTORIES, PlantBug, assert_search_finds
from testing.simulator.world.choices import SeededChoices
from testing.simulator.world.trainer import Workload


def end_workers_of_leader(patch: pytest.MonkeyPatch) -> None:
    """End the workers after a pause of the process, but renew the lease and lead without them."""

    async def run_worker(self: Controller) -> None:
        while True:
            async with self.queue.next() as key:
                if not self._is_leading():
                    return
                await self._run_pass(key)

    async def renew_until_lost(self: LeaderElection) -> None:
        while True:
            await asyncio.sleep(RETRY_PERIOD_SECONDS)
            if not await self._try_acquire_or_renew() and self._get_holder() not in ("", self._lease.identity):
                return

    patch.setattr(Controller, "run_worker", run_worker)
    patch.setattr(LeaderElection, "renew_until_lost", renew_until_lost)


def accept_progress_of_labelled_pods(patch: pytest.MonkeyPatch) -> None:
    """Identify pods by labels only, which any tenant of the namespace can set."""

    def find_rank_zero_host(pods: tuple[RawBody, ...], *, job: JobOwner, attempt: int) -> str | None:
        for pod in reversed(pods):
            labels, status = pod["metadata"]["labels"], pod.get("status", {})
            if labels.get(names.ATTEMPT) == str(attempt) and status.get("phase") == "Running" and status.get("podIP"):
                return str(status["podIP"])
        return None

    def get_labelled_job_key(body: RawBody) -> JobKey | None:
        uid = body["metadata"].get("labels", {}).get(names.JOB_UID)
        return JobKey(body["metadata"]["namespace"], uid) if uid else None

    patch.setattr(progress_poller, "find_rank_zero_host", find_rank_zero_host)
    patch.setattr(child_cache, "get_owning_job_key", get_labelled_job_key)
    patch.setattr(JobCache, "is_current_pod", lambda *_: True)


def ignore_predecessor_pods(patch: pytest.MonkeyPatch) -> None:
    """Do not wait for the pods of a deleted job of the same name."""
    patch.setattr(gather, "_observe_predecessor_pods", lambda job, listed_pods: ())


def fail_watch_on_unreadable_job(patch: pytest.MonkeyPatch) -> None:
    """Parse every job in the handler of the watch, so that one unreadable job ends the watch of all jobs."""

    def on_job_event(self: Controller, body: RawBody) -> None:
        FineTuneJob.parse(body)
        original(self, body)

    original = Controller.on_job_event
    patch.setattr(Controller, "on_job_event", on_job_event)


def complete_attempt_from_edited_spec(patch: pytest.MonkeyPatch) -> None:
    """Complete an attempt with pods of a spec that was edited after the attempt began."""
    patch.setattr(decide, "has_outdated_spec", lambda record, spec: False)
    for module in (decide, attempt_record, ensure_children):
        patch.setattr(module, "compute_config_hash", lambda run_plan: "equal")


def use_image_of_installed_release(patch: pytest.MonkeyPatch) -> None:
    """Start each attempt with the trainer image of the installed release instead of the recorded one."""

    def renew(job: FineTuneJob, settings: Settings) -> JobSnapshot:
        image = job.spec.image or settings.trainer_image
        return renew_snapshot(job, settings).model_copy(update={"image": image, "image_digest": ""})

    patch.setattr(attempt_record, "renew_snapshot", renew)


def use_defaults_of_installed_release(patch: pytest.MonkeyPatch) -> None:
    """Start each attempt with the defaults of the installed release instead of the recorded ones."""

    def renew(job: FineTuneJob, settings: Settings) -> JobSnapshot:
        return renew_snapshot(job, settings).model_copy(update={"defaults": render_defaults(FineTuneJobSpec)})

    patch.setattr(attempt_record, "renew_snapshot", renew)


def drop_unknown_status_fields(patch: pytest.MonkeyPatch) -> None:
    """Drop the status fields that only the next release knows."""
    patch.setattr(reconcile, "_keep_unknown_fields", lambda job, status: status)


def select_by_job_name(patch: pytest.MonkeyPatch) -> Callable[[Iterable[RawBody]], list[RawBody]]:
    """Return a function that selects the objects whose owner has the name of the job of the current pass."""
    current_name = ""

    def observe_cached(job: FineTuneJob, cached: CachedState) -> Observation:
        nonlocal current_name
        current_name = job.metadata.name
        return original(job, cached)

    original = gather.observe_cached
    patch.setattr(reconcile, "observe_cached", observe_cached)
    return lambda bodies: [body for body in bodies if find_controlling_owner(body).get("name") == current_name]


def share_cached_pods_between_namespaces(patch: pytest.MonkeyPatch) -> None:
    """Look up cached pods by the name of the job without its namespace."""

    def pods(self: ChildCache, key: JobKey) -> tuple[RawBody, ...]:
        return tuple(pod for pods in self._pods.values() for pod in pods.values())

    select = select_by_job_name(patch)
    patch.setattr(gather, "select_children", lambda owner, bodies: select(bodies))
    patch.setattr(ChildCache, "pods", pods)


def use_tombstones_of_predecessors(patch: pytest.MonkeyPatch) -> None:
    """Use the tombstones of a deleted job of the same name as evidence."""

    def observe_cached_pods(job: FineTuneJob, cached: CachedState) -> tuple[NodeObservation, ...]:
        return observe_pods(select_children(gather.get_identity(job), cached.pods), select(cached.deleted_pods))

    def deleted_pods(self: ChildCache, key: JobKey) -> tuple[RawBody, ...]:
        return tuple(tombstone.pod for tombstones in self._tombstones.values() for tombstone in tombstones)

    select = select_by_job_name(patch)
    patch.setattr(gather, "observe_cached_pods", observe_cached_pods)
    patch.setattr(ChildCache, "deleted_pods", deleted_pods)
    patch.setattr(ChildCache, "forget", lambda self, key: None)


def wait_inside_workers(patch: pytest.MonkeyPatch) -> None:
    """Wait inside a worker after a pass, so that a few jobs occupy all workers."""

    async def run_pass(self: Controller, key: JobKey) -> None:
        await original(self, key)
        await asyncio.sleep(300.0)

    original = Controller._run_pass
    patch.setattr(Controller, "_run_pass", run_pass)


def enqueue_all_jobs(patch: pytest.MonkeyPatch) -> None:
    """Enqueue all jobs at once after a pod event of any job."""

    def enqueue_debounced(self: Controller, key: JobKey) -> None:
        for each in self.jobs:
            self.enqueue(each)

    patch.setattr(Controller, "enqueue_debounced", enqueue_debounced)


def delete_in_default_namespace(patch: pytest.MonkeyPatch) -> None:
    """Delete objects by name in the default namespace instead of the namespace of the job."""

    async def delete(self: KubernetesCluster, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        existing = await self.get(target.kind, "default", target.name)
        if existing is not None:
            uid = existing["metadata"]["uid"]
            await original(self, ObjectRef(target.kind, "default", target.name, uid), grace_seconds=grace_seconds)

    original = KubernetesCluster.delete
    patch.setattr(KubernetesCluster, "delete", delete)


def accept_forged_config_map(patch: pytest.MonkeyPatch) -> None:
    """Accept an existing object by its owner reference only."""

    async def accept(self: KubernetesCluster, manifest: RawBody) -> None:
        existing = await self.get(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if find_controlling_owner(existing or manifest).get("uid") != find_controlling_owner(manifest)["uid"]:
            await original(self, manifest)

    original = KubernetesCluster._accept_existing_object
    patch.setattr(KubernetesCluster, "_accept_existing_object", accept)


def accept_pods_of_other_ranks(patch: pytest.MonkeyPatch) -> None:
    """Count a pod with the name of a node that the attempt does not have."""

    def include(self: PodIdentities, node_rank: int, uid: str, start_key: str) -> bool:
        return node_rank >= self.num_nodes or original(self, node_rank, uid, start_key)

    original = PodIdentities.include
    patch.setattr(PodIdentities, "include", include)


def ignore_recorded_uids(patch: pytest.MonkeyPatch) -> None:
    """Recognise pods by the start key only, which whoever may read the job can copy."""

    def include(self: PodIdentities, node_rank: int, uid: str, start_key: str) -> bool:
        return original(self._replace(uids=""), node_rank, uid, start_key)

    original = PodIdentities.include
    patch.setattr(PodIdentities, "include", include)


def ignore_obligations_of_unreadable_jobs(patch: pytest.MonkeyPatch) -> None:
    """Leave a job alone whose spec cannot be parsed, even if it is suspended or its deadline passes."""

    def leave_alone(job: RawBody, status: Any, *_: object, **__: object) -> Decision:
        return Decision(status)

    patch.setattr(reconcile, "decide_degraded", leave_alone)


# Bug, kind of history, and a seed that finds it. After a change of the simulator, the search continues from there.
PLANTED_BUGS = (
    (end_workers_of_leader, "paused_operators", 2),
    (accept_progress_of_labelled_pods, "strangers", 19),
    (ignore_predecessor_pods, "strangers", 1),
    (accept_forged_config_map, "strangers", 1),
    (accept_pods_of_other_ranks, "strangers", 3),
    (ignore_recorded_uids, "strangers", 35),
    (use_tombstones_of_predecessors, "strangers", 12),
    (fail_watch_on_unreadable_job, "poisoned_jobs", 2),
    (ignore_obligations_of_unreadable_jobs, "poisoned_jobs", 12),
    (use_image_of_installed_release, "two_releases", 17),
    (use_defaults_of_installed_release, "two_releases", 17),
    (drop_unknown_status_fields, "two_releases", 0),
    (share_cached_pods_between_namespaces, "several_jobs", 0),
    (wait_inside_workers, "several_jobs", 0),
    (enqueue_all_jobs, "several_jobs", 2),
    (delete_in_default_namespace, "several_jobs", 0),
)


def test_an_attempt_that_is_completed_from_an_edited_spec_violates_an_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete_attempt_from_edited_spec(monkeypatch)
    incidents = ((Trigger(0.0), exhaust_quota), (Trigger(3.0), edit_job_under_brief_suspension))
    scenario = Scenario(workload=Workload(num_nodes=3), incidents=incidents, faults_end_seconds=240.0)
    histories = (run_history(scenario, SeededChoices(seed)) for seed in range(MAX_HISTORIES))

    assert any("differs from the other pods" in str(history.violations) for history in histories)


@pytest.mark.parametrize(("plant_bug", "kind", "seed"), PLANTED_BUGS, ids=[bug.__name__ for bug, *_ in PLANTED_BUGS])
def test_search_finds_planted_bug(plant_bug: PlantBug, kind: str, seed: int) -> None:
    assert_search_finds(plant_bug, kind, seed)
