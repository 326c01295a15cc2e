"""Invariants of jobs with a queue: quota, admission, kept and returned quota, and preemptors."""

from collections import defaultdict
from collections.abc import Iterator

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.obligations import REACTION_SECONDS
from testing.simulator.world.apiserver import TERMINAL, Change, ObjectKey, RawBody
from testing.simulator.world.cluster_queue import FINISHED, PREEMPTED, QUOTA_RESERVED, has_condition
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.kueue import GROUP_LABEL
from testing.simulator.world.parsed_objects import parse_status
from testing.simulator.world.world import World


class QueueMonitor:
    """Checks the commits of all jobs with a queue, and that jobs that do not run return their quota."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[str, str] = {}  # job uid -> group of its first pod
        self._workload_uids: defaultdict[str, set[str]] = defaultdict(set)  # by namespace and name
        self._overdue_seconds: defaultdict[str, float] = defaultdict(float)  # by job uid
        world.server.listeners.append(self._on_commit)

    def check(self, seconds: float) -> None:
        """Check that suspended, finished and deleted jobs return their quota; called every `seconds`."""
        can_act = any(operator.can_act for operator in self._world.operators) and self._world.kueue.is_running
        for job in self._world.jobs:
            for uid in job.uids:
                is_overdue = can_act and _is_idle(job, uid) and self._holds_quota(job, uid)
                self._overdue_seconds[uid] = self._overdue_seconds[uid] + seconds if is_overdue else 0.0
                if self._overdue_seconds[uid] > REACTION_SECONDS:
                    self._world.report(f"{job} ({uid}) does not run, but has held quota for {REACTION_SECONDS} s")

    def _holds_quota(self, job: SimulatedJob, uid: str) -> bool:
        """Return whether a Workload or Kueue's finalizer remains that the operator can remove."""
        pods = [pod for _, pod in self._world.list_all_pods() if get_controller_uid(pod) == uid]
        if any(self._world.is_lost(pod) for pod in pods):
            return False
        workload = self._world.server.get(_build_workload_key(job, uid))
        is_unfinished = workload is not None and not has_condition(workload, FINISHED)
        return is_unfinished or any(names.KUEUE_FINALIZER in pod["metadata"].get("finalizers", ()) for pod in pods)

    def _on_commit(self, change: Change) -> None:
        by_operator = change.actor.startswith("operator")
        if change.kind == "Pod" and change.actor == "scheduler":
            self._check_assignment(change)
        elif change.kind == "Pod" and by_operator and change.old_body is None:
            self._check_group(change.body)
        elif change.kind == names.WORKLOAD_KIND:
            metadata = change.body["metadata"]
            self._workload_uids[f"{metadata['namespace']}/{metadata['name']}"].add(metadata["uid"])
            is_deleted = "deletionTimestamp" in metadata and "deletionTimestamp" not in (change.old_body or {}).get(
                "metadata", {}
            )
            if by_operator and is_deleted and not self._world.has_split_brain:
                self._check_return(change.body)
        elif change.kind == names.FINETUNEJOB_KIND and by_operator and change.new_body is not None:
            self._check_preemptors(change.new_body)

    def _check_assignment(self, change: Change) -> None:
        """Check that a pod of a job with a queue is admitted, and that the quota suffices for all such pods."""
        pod = change.body
        was_assigned = change.old_body is not None and change.old_body["spec"].get("nodeName")
        job = self._find_job(get_controller_uid(pod))
        if was_assigned or not pod["spec"].get("nodeName") or job is None or job.body is None:
            return
        if "queueName" not in job.body["spec"].get("scheduling", {}):
            return
        metadata = pod["metadata"]
        group = metadata["labels"].get(GROUP_LABEL, "")
        workload = self._world.server.get(ObjectKey(names.WORKLOAD_KIND, metadata["namespace"], group))
        if workload is None or not has_condition(workload, QUOTA_RESERVED):
            self._world.report(f"{metadata['name']} was assigned to a Kubernetes node without admission")
        in_use = [pod["metadata"]["name"] for _, pod in self._world.list_all_pods() if self._uses_quota(pod)]
        if len(in_use) > self._world.kueue.queue.quota:
            self._world.report(f"the quota of {self._world.kueue.queue.quota} pods is exceeded by {in_use}")

    def _uses_quota(self, pod: RawBody) -> bool:
        """Return whether a pod with a queue occupies a Kubernetes node that was never lost.

        A pod that a user deletes without a grace period does not count: Kueue returns its quota at once.
        """
        k8s_node = self._world.k8s_nodes.find_k8s_node(pod)
        metadata = pod["metadata"]
        if names.KUEUE_MANAGED not in metadata["labels"] or metadata.get("deletionGracePeriodSeconds") == 0:
            return False
        if k8s_node is None or k8s_node.loss_count:
            return False
        process, _ = self._world.k8s_nodes.processes.get(metadata["uid"], (None, None))
        if process is not None:
            return process.is_running
        return pod["status"].get("phase") not in TERMINAL and "deletionTimestamp" not in metadata

    def _check_group(self, pod: RawBody) -> None:
        """Check that all pods of a job are in one group, because a new group is queued behind the others."""
        uid, group = get_controller_uid(pod) or "", pod["metadata"]["labels"].get(GROUP_LABEL, "")
        if self._groups.setdefault(uid, group) != group:
            self._world.report(f"{pod['metadata']['name']} left the group {self._groups[uid]}, which loses its quota")

    def _check_return(self, workload: RawBody) -> None:
        """Check that an operator returns quota only for a job that cannot keep it for its next attempt."""
        if has_condition(workload, FINISHED):
            return
        metadata = workload["metadata"]
        key = ObjectKey(names.WORKLOAD_KIND, metadata["namespace"], metadata["name"])
        job = next((job for job in self._world.jobs if key == _build_workload_key(job, job.uid)), None)
        if job is None or _is_idle(job, job.uid) or not job.status.get("attempts"):
            return
        pods = [pod for _, pod in job.list_pods()]
        if not any(_explain_return(job, pods)):
            attempt = job.status["attempt"]
            self._world.report(f"{job} returned its quota before attempt {attempt}, which could keep it")

    def _check_preemptors(self, body: RawBody) -> None:
        """Check that the record of an attempt that Kueue preempted names a Workload that preempted the job."""
        metadata = body["metadata"]
        key = f"{metadata['namespace']}/{names.workload_name(metadata['name'], metadata['uid'])}"
        preemptors = self._world.kueue.queue.preemptors
        known = {preemptor for uid in self._workload_uids[key] for preemptor in preemptors.get(uid, ())}
        for record in parse_status(body).attempts:
            disruptions = {evidence.disruption for evidence in record.evidence}
            is_preempted = record.reason == Reason.PREEMPTED and f"WorkloadEvictedDueTo{PREEMPTED}" in disruptions
            if is_preempted and known and not any(uid in record.message for uid in known):
                self._world.report(f"attempt {record.attempt} was preempted by {known}, but reports {record.message}")

    def _find_job(self, uid: str | None) -> SimulatedJob | None:
        return next((job for job in self._world.jobs if job.uid == uid), None)


def _build_workload_key(job: SimulatedJob, uid: str) -> ObjectKey:
    return ObjectKey(names.WORKLOAD_KIND, job.key.namespace, names.workload_name(job.key.name, uid))


def _is_idle(job: SimulatedJob, uid: str) -> bool:
    """Return whether the job with this uid is deleted, finished or suspended."""
    body = job.body
    if body is None or uid != job.uid or "deletionTimestamp" in body["metadata"]:
        return True
    if "completionTime" in job.status:
        return True
    # a job that the operator cannot reconcile has no condition
    are_pods_ended = all(map(_has_ended, (pod for _, pod in job.list_pods())))
    return body["spec"].get("suspend") is True and (job.get_condition_status("Suspended") == "True" or are_pods_ended)


def _has_ended(pod: RawBody) -> bool:
    """Return whether the pod has ended, or was deleted before it was assigned to a Kubernetes node."""
    is_unscheduled = "deletionTimestamp" in pod["metadata"] and not pod["spec"].get("nodeName")
    return is_unscheduled or pod["status"].get("phase") in TERMINAL


def _explain_return(job: SimulatedJob, pods: list[RawBody]) -> Iterator[bool]:
    """Yield whether each of the reasons to return the quota of a job that continues applies."""
    *_, last, current = (None, *parse_status(job.body or {}).attempts)
    yield current is not None and current.state is AttemptState.STOPPED
    if last is not None and current is not None:
        yield last.action in (FailureAction.REPAIR, "Suspend")
        yield last.avoids != current.avoids
    # Kueue replaces only pods that have failed
    yield any(pod["status"].get("phase") != "Failed" and pod["spec"].get("nodeName") for pod in pods)
