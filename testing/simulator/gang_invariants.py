"""Invariants of jobs whose pods are gangs of Kubernetes: common placement, PodGroups, and the recorded provider."""

from collections import defaultdict
from typing import NamedTuple

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.obligations import REACTION_SECONDS
from testing.simulator.world.apiserver import POD_GROUP_VERSION, Change, RawBody
from testing.simulator.world.gang_scheduler import SCHEDULER
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.kubernetes_nodes import read_process
from testing.simulator.world.world import World


class Attempt(NamedTuple):
    """One attempt of a job; `number` is the value of its label."""

    job_uid: str
    number: str


class GangMonitor:
    """Checks the commits of all jobs with spec.scheduling but without a queue."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._attempts: dict[tuple[str, str], Attempt] = {}  # by namespace and name of the PodGroup
        self._pod_groups: dict[Attempt, str] = {}  # name of the PodGroup
        self._placed_at: defaultdict[Attempt, dict[str, float]] = defaultdict(dict)  # by pod name
        self._ungrouped: set[Attempt] = set()  # the feature gate was disabled between the dry run and a create
        self._overdue_seconds: defaultdict[str, float] = defaultdict(float)  # by job uid
        world.server.listeners.append(self._on_commit)

    def check(self, seconds: float) -> None:
        """Check that a job without a provider reports this, and otherwise chooses one; called every `seconds`."""
        can_act = any(operator.can_act for operator in self._world.operators)
        for job in self._world.jobs:
            is_overdue = can_act and _is_gang(job) and self._lacks_provider(job)
            self._overdue_seconds[job.uid] = self._overdue_seconds[job.uid] + seconds if is_overdue else 0.0
            if self._overdue_seconds[job.uid] > REACTION_SECONDS:
                self._world.report(f"{job} has neither a provider nor a reason to wait: {job.status.get('waiting')}")

    def check_settled(self) -> None:
        """Check that deleted jobs have no PodGroup, and complete jobs none of an earlier attempt.

        Only the operator deletes that of an earlier attempt, which fails silently while its API is not served.
        """
        jobs = {job.uid: job for job in self._world.jobs if job.body is not None}
        for key, pod_group in self._world.server.list_objects(names.POD_GROUP_KIND):
            attempt = _get_attempt(pod_group)
            job = jobs.get(attempt.job_uid)
            if job is None:
                self._world.report(f"PodGroup {key.name} remains although its job was deleted")
            elif key in self._world.server.unserved or job.get_condition_status("Complete") != "True":
                continue
            elif attempt.number != str(job.status["attempt"]):
                self._world.report(f"PodGroup {key.name} remains although attempt {job.status['attempt']} has run")

    def _lacks_provider(self, job: SimulatedJob) -> bool:
        """Return whether the job neither has a provider nor reports that the cluster has none."""
        status, spec = job.status, (job.body or {})["spec"]
        is_starting = bool(status.get("attempts")) and status["attempts"][-1]["state"] == AttemptState.STARTING
        is_stopped = spec.get("suspend") or spec.get("cancel") or "deletionTimestamp" in (job.body or {})["metadata"]
        # the operator first waits for the pods of earlier attempts and jobs
        if not is_starting or is_stopped or "scheduling" in status or job.list_pods_of_all_uids():
            return False
        if job.has_orphaned_pods() or job.key.namespace in self._world.server.pod_quotas:
            return False
        server = self._world.server
        has_provider = POD_GROUP_VERSION in server.served_versions and server.keeps_scheduling_groups
        return has_provider or status.get("waiting", {}).get("reason") != Reason.NO_GROUP_SCHEDULER

    def _on_commit(self, change: Change) -> None:
        by_operator, is_new = change.actor.startswith("operator"), change.old_body is None
        if change.kind == names.POD_GROUP_KIND and is_new:
            self._record_pod_group(change.body)
        elif change.kind == "Pod" and is_new and by_operator:
            self._check_created_pod(change.body)
        elif change.kind == "Pod" and not is_new and change.new_body is not None:
            self._record_placement(change)
            self._check_start(change)
        elif change.kind == names.FINETUNEJOB_KIND and by_operator and change.old_body and change.new_body:
            self._check_provider(change.old_body.get("status") or {}, change.new_body["status"])

    def _record_pod_group(self, pod_group: RawBody) -> None:
        metadata, attempt = pod_group["metadata"], _get_attempt(pod_group)
        self._attempts[metadata["namespace"], metadata["name"]] = attempt
        if self._pod_groups.setdefault(attempt, metadata["name"]) != metadata["name"]:
            self._world.report(f"attempt {attempt} has a second PodGroup {metadata['name']}")

    def _check_created_pod(self, pod: RawBody) -> None:
        """Check that the PodGroup of its own attempt and the recorded provider are older than the pod."""
        attempt, metadata = _get_attempt(pod), pod["metadata"]
        job = next((job for job in self._world.jobs if job.uid == attempt.job_uid and _is_gang(job)), None)
        if job is None:
            return
        if str(job.status.get("attempt")) == attempt.number and "scheduling" not in job.status:
            self._world.report(f"{metadata['name']} was created before its provider was recorded")
        name = pod["spec"].get("schedulingGroup", {}).get("podGroupName")
        if name is None:
            self._ungrouped.add(attempt)
            if not self._was_probed(attempt):
                self._world.report(f"{metadata['name']} was created without a group although no dry run kept it")
        elif self._attempts.get((metadata["namespace"], name)) != attempt:
            self._world.report(f"{metadata['name']} was created before a PodGroup {name} of its attempt")

    def _was_probed(self, attempt: Attempt) -> bool:
        """Return whether a dry run of this attempt has shown that its pods keep spec.schedulingGroup."""
        return any(
            "schedulingGroup" in pod["spec"] and _get_attempt(pod) == attempt for pod in self._world.server.dry_runs
        )

    def _record_placement(self, change: Change) -> None:
        was_placed = change.old_body is not None and change.old_body["spec"].get("nodeName")
        if change.actor == SCHEDULER and change.body["spec"].get("nodeName") and not was_placed:
            self._placed_at[_get_attempt(change.body)][change.body["metadata"]["name"]] = change.time

    def _check_start(self, change: Change) -> None:
        """Check that a pod of a gang starts only after all pods of its attempt were placed together."""
        attempt = _get_attempt(change.body)
        was_running, is_running = _is_running(change.old_body or {}), _is_running(change.body)
        job = next((job for job in self._world.jobs if job.uid == attempt.job_uid and _is_gang(job)), None)
        if job is None or was_running or not is_running or attempt in self._ungrouped:
            return
        placed_at = self._placed_at[attempt]
        num_nodes = read_process(change.body, ()).num_nodes
        if len(placed_at) != num_nodes or len(set(placed_at.values())) != 1:
            self._world.report(f"{change.body['metadata']['name']} runs although its gang was placed at {placed_at}")

    def _check_provider(self, old_status: RawBody, new_status: RawBody) -> None:
        """Check that an attempt keeps its provider."""
        old_provider, new_provider = (
            {**status.get("scheduling", {}), "position": None} for status in (old_status, new_status)
        )
        is_same_attempt = old_status.get("attempt") == new_status.get("attempt")
        if is_same_attempt and "scheduling" in old_status and old_provider != new_provider:
            self._world.report(f"the provider of attempt {new_status['attempt']} was chosen again")


def _is_gang(job: SimulatedJob) -> bool:
    scheduling = ((job.body or {}).get("spec") or {}).get("scheduling")
    return scheduling is not None and "queueName" not in scheduling


def _get_attempt(body: RawBody) -> Attempt:
    metadata = body["metadata"]
    return Attempt(get_controller_uid(body) or "", metadata.get("labels", {}).get(names.ATTEMPT, ""))


def _is_running(pod: RawBody) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return any("running" in status.get("state", {}) for status in statuses)
