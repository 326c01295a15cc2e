"""What decide works with: the case (one job at one moment) and the decision, and how a decision is put into words."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, WaitStatus
from finetune_operator.core.actions import Action, DeletePod
from finetune_operator.core.conditions import Told, tell
from finetune_operator.core.pending import Wait, waiting_for
from finetune_operator.failures.evidence import steps, with_losses
from finetune_operator.failures.node_avoidance import remember
from finetune_operator.failures.rules import most_telling
from finetune_operator.observation.pods import Life, NodeObservation, Observation
from finetune_operator.plan.run_plan import Settings

KEPT_EVIDENCE = 8
OUTLIVED_PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Decision:
    """What to write, then what to do, then when to look again. `unsure`: only a fresh LIST may confirm it."""

    status: JobStatus
    actions: tuple[Action, ...] = ()
    requeue_after: timedelta | None = None
    unsure: bool = False


@dataclass(frozen=True)
class Case:
    """One job at one moment: the arguments of decide under one name."""

    job: FineTuneJob
    seen: Observation
    now: datetime
    settings: Settings

    @property
    def status(self) -> JobStatus:
        return self.job.status

    @property
    def record(self) -> AttemptRecord:
        return self.status.attempts[-1]

    @property
    def nodes(self) -> tuple[NodeObservation, ...]:
        """The present attempt's nodes, alive or remembered."""
        return self.seen.of_attempt(self.record.attempt)

    @property
    def wait(self) -> Wait | None:
        """Why pods do not start, if any attempt was begun."""
        return waiting_for(self.job, self.seen, self.nodes, self.now) if self.status.attempts else None

    @property
    def deadline(self) -> datetime | None:
        """When the job has been active for too long; time spent suspended does not count."""
        limit, started = self.job.spec.active_deadline_seconds, self.status.start_time
        if limit is None or started is None:
            return None
        return started + timedelta(seconds=limit + self.status.suspended_seconds)

    @property
    def pending_deadline(self) -> datetime | None:
        """When nodes that are to start must all run."""
        limit, since = self.job.spec.pending_deadline_seconds, self.record.pending_since
        starting = self.record.state is AttemptState.STARTING
        return since + timedelta(seconds=limit) if starting and limit is not None and since is not None else None

    @property
    def release_time(self) -> datetime | None:
        """When nodes that run give up waiting for those that cannot start."""
        limit, wait, told = self.job.spec.startup_deadline_seconds, self.wait, self.status.waiting
        begun = [node.started_at for node in self.nodes if node.life is Life.RUNNING and node.started_at]
        if not limit or not begun or wait is None or told is None or not wait.for_ever:
            return None
        since = told.since if told.reason == wait.reason else self.now
        return self._not_before(begun, since) + timedelta(seconds=limit)

    def patience_ends(self, told: WaitStatus | None) -> datetime | None:
        """When what is waited for, and was told, is waited for no longer."""
        wait = self.wait
        if wait is None or wait.patience is None or told is None or told.reason != wait.reason:
            return None
        made = [node.making_since for node in self.nodes if node.life is Life.PENDING and node.making_since]
        return self._not_before(made, told.since) + wait.patience

    def _not_before(self, others: list[datetime], ours: datetime) -> datetime:
        """Our time, but not before the first of those by other clocks, for ours may have been slow; a clock that is
        ahead of ours tells nothing."""
        return max(ours, min((time for time in others if time <= self.now), default=ours))

    @property
    def steps(self) -> dict[str, object]:
        """First and last step of the present attempt, and when it trained."""
        return steps(self.record, self.nodes, self.seen.progress)

    def running_pods(self) -> list[NodeObservation]:
        """Pods of any attempt of which a process may still run."""
        return [node for node in self.seen.live() if node.may_run(self.now)]

    def outlived_pods(self) -> tuple[list[NodeObservation], timedelta | None]:
        """Pods that a container which somebody injected keeps, and their machines with them; when there may be more."""
        outlived = [(node, node.outlived_since) for node in self.seen.live() if node.outlived_since]
        left = [(node, since + OUTLIVED_PATIENCE - self.now) for node, since in outlived]
        waits = (time for _, time in left if time > timedelta())
        return [node for node, time in left if time <= timedelta()], min(waits, default=None)

    def deletions(self, nodes: list[NodeObservation], grace_seconds: int) -> tuple[Action, ...]:
        """Stop these pods within this time; one that was given longer is hurried."""
        limit = self.now + timedelta(seconds=2 * grace_seconds)
        return tuple(
            DeletePod(node.pod_name, node.uid, grace_seconds)
            for node in nodes
            if node.deletion_deadline is None or node.deletion_deadline > limit
        )


def with_record(status: JobStatus, record: AttemptRecord) -> JobStatus:
    """The status with the present attempt's record replaced, and what it tells of the one before.

    Of an attempt that is over little evidence is kept: an object of the API server may have 1.5 MB, and twenty attempts
    of a thousand nodes would have ten times that.
    """
    if record.end_time is not None:
        record = record.model_copy(update={"evidence": most_telling(record.evidence, limit=KEPT_EVIDENCE)})
    return status.model_copy(update={"attempts": (*with_losses(status.attempts[:-1], record), record)})


def with_next(status: JobStatus, record: AttemptRecord, now: datetime) -> JobStatus:
    """The status with a new attempt begun."""
    attempts = remember((*status.attempts, record), now)
    return status.model_copy(update={"attempt": record.attempt, "attempts": attempts})


def write(
    case: Case, status: JobStatus, *, actions: tuple[Action, ...] = (), look_again: timedelta | None = None
) -> Decision:
    """The decision, with everything that is told to people filled in and the next time limit as alarm."""
    told = tell(case.job.model_copy(update={"status": status}), Told(case.seen, case.wait, case.now))
    return Decision(told, actions, requeue_after=_alarm(case, told, look_again))


def confirmed(case: Case, decision: Decision) -> Decision:
    """A decision that rests on absence, which a cache cannot prove."""
    return replace(decision, unsure=not case.seen.fresh)


def _alarm(case: Case, status: JobStatus, look_again: timedelta | None) -> timedelta | None:
    """The earliest moment to come at which time alone changes the decision."""
    times = [look_again] if look_again is not None else []
    if case.deadline is not None and status.completion_time is None and not case.job.spec.suspend:
        times.append(case.deadline - case.now)
    if status.completion_time is None and case.status.attempts:
        times += [time - case.now for time in (case.pending_deadline, case.release_time) if time is not None]
    if (patience_ends := case.patience_ends(status.waiting)) is not None:
        times.append(patience_ends - case.now)
    if status.completion_time is not None and case.job.spec.ttl_seconds_after_finished is not None:
        times.append(timedelta(seconds=case.job.spec.ttl_seconds_after_finished))
    return min((time for time in times if time > timedelta()), default=None)
