"""Defines JobContext, the input of one decision."""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptRecord, JobStatus
from finetune_operator import names
from finetune_operator.core.actions import Action, DeletePod, DeleteWorkload
from finetune_operator.core.pending_reasons import PendingReason, find_pending_reason
from finetune_operator.core.succeeded_nodes import add_succeeded_nodes
from finetune_operator.observation.pods import NodeObservation, Observation
from finetune_operator.settings import Settings

SIDECAR_TIMEOUT = timedelta(seconds=30)
ABORT_GRACE_SECONDS = 10  # grace period for peers of a failed node, whose blocked ranks have nothing to save


@dataclass(frozen=True)
class JobContext:
    """Input of one decision: job, observation, time and settings."""

    job: FineTuneJob
    observation: Observation
    now: datetime
    settings: Settings

    @property
    def status(self) -> JobStatus:
        """Status that the last pass wrote."""
        return self.job.status

    @property
    def record(self) -> AttemptRecord:
        """Record of the current attempt."""
        return self.status.attempts[-1]

    @cached_property
    def nodes(self) -> tuple[NodeObservation, ...]:
        """Nodes of the current attempt, from live pods, tombstones and the recorded successes."""
        return add_succeeded_nodes(self.record, self.observation.nodes_of_attempt(self.record.attempt), self.job)

    @cached_property
    def pending_reason(self) -> PendingReason | None:
        """Reason why pods of the current attempt do not start; None without such a pod or an attempt."""
        return find_pending_reason(self.job, self.observation, self.nodes, self.now) if self.status.attempts else None

    @property
    def ttl_seconds(self) -> int | None:
        """Time after which the finished job is deleted, by default that of the operator; None keeps the job."""
        own_ttl = self.job.spec.ttl_seconds_after_finished
        if not self.settings.delete_finished_jobs:
            return None
        return self.settings.default_ttl_seconds if own_ttl is None else own_ttl

    @property
    def ignores_ttl(self) -> bool:
        """Whether the job has a TTL, but this operator deletes no jobs."""
        return self.job.spec.ttl_seconds_after_finished is not None and not self.settings.delete_finished_jobs

    def find_expected_pods(self) -> frozenset[str]:
        """Return the names of pods of the current attempt that were created, but of which no event has arrived."""
        attempt_pods = (
            names.pod_name(self.job.metadata.name, self.record.attempt, rank)
            for rank in range(self.job.num_attempt_nodes)
        )
        observed_pods = {node.pod_name for node in self.nodes}
        return self.observation.expected_pods.intersection(attempt_pods) - observed_pods

    def running_pods(self) -> list[NodeObservation]:
        """Return the pods of all attempts in which a process may still run."""
        return [node for node in self.observation.live_nodes() if node.may_run(self.now)]

    def find_pods_kept_by_sidecars(self) -> tuple[list[NodeObservation], timedelta | None]:
        """Return the pods in which an injected sidecar still runs SIDECAR_TIMEOUT after the trainer ended.

        The second value is the time until the next pod reaches this timeout.
        """
        timeouts = [
            (node, node.sidecar_running_since + SIDECAR_TIMEOUT - self.now)
            for node in self.observation.live_nodes()
            if node.sidecar_running_since
        ]
        remaining = (time for _, time in timeouts if time > timedelta())
        return [node for node, time in timeouts if time <= timedelta()], min(remaining, default=None)

    def release_quota(self) -> tuple[Action, ...]:
        """Return the deletion of Kueue's Workload if no process runs, but pods of the job still hold quota.

        Pods of lost Kubernetes nodes are removed, because Kueue would reserve quota for them again.
        """
        managed = [node for node in self.observation.live_nodes() if node.is_managed_by_kueue]
        lost = [node for node in managed if not node.has_ended]
        is_held = any(node.is_held_by_kueue for node in managed)
        if self.running_pods() or not (is_held or lost):
            return ()
        removals = (DeletePod(node.pod_name, node.uid, grace_seconds=0) for node in lost)
        return (*removals, *self.delete_workload())

    def delete_workload(self) -> tuple[Action, ...]:
        """Return the deletion of Kueue's Workload, which is created again if all pods of the group exist."""
        return (DeleteWorkload(names.workload_name(self.job.metadata.name, self.job.metadata.uid)),)

    def build_deletions(self, nodes: list[NodeObservation], grace_seconds: int) -> tuple[Action, ...]:
        """Return actions that delete the pods, or shorten the grace period of pods that are already terminating."""
        limit = self.now + timedelta(seconds=2 * grace_seconds)

        def is_needed(node: NodeObservation) -> bool:
            if node.deletion_deadline is not None:
                return node.deletion_deadline > limit
            return self.observation.sent_deletions.get(node.uid, math.inf) > grace_seconds

        return tuple(DeletePod(node.pod_name, node.uid, grace_seconds) for node in nodes if is_needed(node))
