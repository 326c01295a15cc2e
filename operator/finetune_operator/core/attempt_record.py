"""The records in status.attempts: start, verdict and downtime of an attempt, and the record of the next one.

core.progress reads the first and the last step, core.stop_attempt decides how an attempt ends, failures.merge_evidence
fills its evidence.
"""

from datetime import datetime

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.progress import step_range
from finetune_operator.failures.node_avoidance import nodes_to_avoid, prune_attempts
from finetune_operator.failures.rules import most_relevant
from finetune_operator.failures.verdict import Verdict
from finetune_operator.observation.pods import PodPhase

MAX_KEPT_EVIDENCE = 8  # nodes per ended attempt (decisions/106)


def next_attempt(context: JobContext, status: JobStatus) -> AttemptRecord:
    """Return the record of the attempt after those in the status, which avoids Kubernetes nodes that failed them."""
    can_avoid = context.job.spec.restart_policy.avoid_failing_nodes and context.settings.on_cluster
    last = status.attempts[-1]
    # an attempt that never ran does not extend pendingDeadlineSeconds
    pending_since = last.pending_since if last.running_time is None and last.state is AttemptState.FAILED else None
    return AttemptRecord(
        attempt=last.attempt + 1,
        state=AttemptState.STARTING,
        start_time=context.now,
        pending_since=context.now if pending_since is None else pending_since,
        avoids=nodes_to_avoid(status.attempts, context.now) if can_avoid else (),
    )


def record_start(context: JobContext) -> AttemptRecord:
    """Return the record of a starting or running attempt with whether all its objects were created and all pods run."""
    record = context.record
    # all children exist once every pod and the Service were observed together
    live = [node for node in context.nodes if node.phase is not PodPhase.GONE]
    created = record.created or (len(live) == context.job.spec.num_nodes and context.observation.service_exists)
    # the attempt runs once every node runs or has succeeded
    all_run = created and all(node.phase is PodPhase.RUNNING or node.succeeded for node in context.nodes)
    started = record.state is AttemptState.RUNNING or all_run
    update = {
        "created": created,
        "state": AttemptState.RUNNING if started else AttemptState.STARTING,
        "running_time": record.running_time or (context.now if started else None),
    }
    return record.model_copy(update={**update, **step_range(context)})


def with_verdict(record: AttemptRecord, verdict: Verdict) -> AttemptRecord:
    """Return the record with reason, fault and message of the verdict, and the node and rank that it names."""
    cause = verdict.evidence
    update = {
        "reason": verdict.reason,
        "fault": verdict.fault,
        "message": verdict.message,
        "node_rank": cause.node_rank if cause else None,
        "rank": cause.rank if cause else None,
        "k8s_node": cause.k8s_node if cause else "",
    }
    return record.model_copy(update=update)


def with_record(status: JobStatus, record: AttemptRecord) -> JobStatus:
    """Return the status with the record of the current attempt replaced and the downtime before it recorded.

    An ended attempt keeps the evidence of a few nodes only: etcd limits an object to 1.5 MB, and twenty attempts of a
    thousand nodes would need ten times that.
    """
    if record.end_time is not None:
        record = record.model_copy(update={"evidence": most_relevant(record.evidence, limit=MAX_KEPT_EVIDENCE)})
    return status.model_copy(update={"attempts": (*record_downtime(status.attempts[:-1], record), record)})


def with_next_attempt(status: JobStatus, record: AttemptRecord, now: datetime) -> JobStatus:
    """Return the status with the record of a new attempt appended."""
    attempts = prune_attempts((*status.attempts, record), now)
    return status.model_copy(update={"attempt": record.attempt, "attempts": attempts})


def record_downtime(ended: tuple[AttemptRecord, ...], record: AttemptRecord) -> tuple[AttemptRecord, ...]:
    """Add downtime and lost steps to the last attempt that failed during training, once `record` trains again."""
    # decisions/210
    trained = [index for index, each in enumerate(ended) if each.first_step_time is not None]
    if record.first_step_time is None or not trained:
        return ended
    before = ended[trained[-1]]
    if before.state is not AttemptState.FAILED or before.downtime_seconds is not None:
        return ended
    failure_times = [
        each.finished_at for each in before.evidence if each.finished_at and each.outcome != Outcome.STOPPED
    ]
    failed_at = min(failure_times, default=before.end_time)
    downtime = record.first_step_time - failed_at if failed_at else None
    steps_lost = (before.last_step or 0) - record.first_step if record.first_step is not None else None
    update = {
        "downtime_seconds": max(0, round(downtime.total_seconds())) if downtime is not None else None,
        "steps_lost": None if steps_lost is None else max(0, steps_lost),
    }
    return (*ended[: trained[-1]], before.model_copy(update=update), *ended[trained[-1] + 1 :])
