"""JobContext: the facts that a decision rests on, and the deadlines that follow from them."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, WaitStatus
from finetune_operator.core.actions import Action, DeletePod
from finetune_operator.core.pending import PendingReason, find_pending_reason
from finetune_operator.observation.pods import NodeObservation, Observation, PodPhase
from finetune_operator.settings import Settings

SIDECAR_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class JobContext:
    """The arguments of one decision: the job, the observation of its children, the time and the settings."""

    job: FineTuneJob
    observation: Observation
    now: datetime
    settings: Settings

    @property
    def status(self) -> JobStatus:
        """The status that the last pass wrote."""
        return self.job.status

    @property
    def record(self) -> AttemptRecord:
        """The record of the current attempt."""
        return self.status.attempts[-1]

    @property
    def nodes(self) -> tuple[NodeObservation, ...]:
        """The nodes of the current attempt, from live pods and tombstones."""
        return self.observation.nodes_of_attempt(self.record.attempt)

    @property
    def pending_reason(self) -> PendingReason | None:
        """Why pods of the current attempt do not start; None if all do, or before the first attempt."""
        return find_pending_reason(self.job, self.observation, self.nodes, self.now) if self.status.attempts else None

    @property
    def active_deadline(self) -> datetime | None:
        """When activeDeadlineSeconds ends; time spent suspended does not count."""
        limit, started = self.job.spec.active_deadline_seconds, self.status.start_time
        if limit is None or started is None:
            return None
        return started + timedelta(seconds=limit + self.status.suspended_seconds)

    @property
    def pending_deadline(self) -> datetime | None:
        """When pendingDeadlineSeconds ends: by then every node of a starting attempt must run."""
        limit, since = self.job.spec.pending_deadline_seconds, self.record.pending_since
        starting = self.record.state is AttemptState.STARTING
        return since + timedelta(seconds=limit) if starting and limit is not None and since is not None else None

    @property
    def release_time(self) -> datetime | None:
        """When startupDeadlineSeconds ends: then running nodes are released, because others cannot start."""
        limit, pending_reason = self.job.spec.startup_deadline_seconds, self.pending_reason
        reported = self.status.waiting
        started = [node.started_at for node in self.nodes if node.phase is PodPhase.RUNNING and node.started_at]
        if not limit or not started or pending_reason is None or reported is None or not pending_reason.has_no_timeout:
            return None
        since = reported.since if reported.reason == pending_reason.reason else self.now
        return self._correct_slow_clock(since, started) + timedelta(seconds=limit)

    def pending_timeout_at(self, reported: WaitStatus | None) -> datetime | None:
        """Return when the reported pending reason times out; None if it has no timeout or no longer applies."""
        pending_reason = self.pending_reason
        if pending_reason is None or pending_reason.timeout is None:
            return None
        if reported is None or reported.reason != pending_reason.reason:
            return None
        pending = (node for node in self.nodes if node.phase is PodPhase.PENDING)
        creating = [node.container_creating_since for node in pending if node.container_creating_since]
        return self._correct_slow_clock(reported.since, creating) + pending_reason.timeout

    def _correct_slow_clock(self, since: datetime, pod_times: list[datetime]) -> datetime:
        """Return `since`, but no earlier than the first of the pods' times: the clock that wrote it may have been slow.

        Times in the future come from a clock ahead of this one and are ignored.
        """
        return max(since, min((time for time in pod_times if time <= self.now), default=since))

    def running_pods(self) -> list[NodeObservation]:
        """Return the pods of any attempt in which a process may still run."""
        return [node for node in self.observation.live_nodes() if node.may_run(self.now)]

    def pods_kept_by_sidecars(self) -> tuple[list[NodeObservation], timedelta | None]:
        """Return the pods in which an injected sidecar outlasts the trainer by SIDECAR_TIMEOUT.

        The second value is the time until the next such pod is due.
        """
        timeouts = [
            (node, node.sidecar_running_since + SIDECAR_TIMEOUT - self.now)
            for node in self.observation.live_nodes()
            if node.sidecar_running_since
        ]
        remaining = (time for _, time in timeouts if time > timedelta())
        return [node for node, time in timeouts if time <= timedelta()], min(remaining, default=None)

    def deletions(self, nodes: list[NodeObservation], grace_seconds: int) -> tuple[Action, ...]:
        """Return the deletions of these pods; one already being deleted with a longer grace period is shortened."""
        limit = self.now + timedelta(seconds=2 * grace_seconds)
        return tuple(
            DeletePod(node.pod_name, node.uid, grace_seconds)
            for node in nodes
            if node.deletion_deadline is None or node.deletion_deadline > limit
        )
