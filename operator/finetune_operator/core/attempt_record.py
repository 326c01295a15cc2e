"""Creates and updates the attempt records in `status.attempts`.

core.progress derives the first and the last step, core.stop_attempt decides how an attempt ends, and
failures.merge_evidence collects the evidence.
"""

from finetune_api.bounded_text import truncate_text, truncate_text_start
from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import EVIDENCE_MESSAGE_BYTES, AttemptRecord, AttemptState, Evidence, JobStatus
from finetune_api.visible_text import escape_controls
from finetune_operator.core.gpu_seconds import drop_attempts
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.progress import summarise_steps
from finetune_operator.core.snapshot import renew_snapshot
from finetune_operator.core.spec_hash import compute_spec_hash
from finetune_operator.failures.node_avoidance import find_nodes_to_avoid, prune_attempts
from finetune_operator.failures.rules import select_most_relevant
from finetune_operator.failures.summarise_evidence import measure_evidence_bytes, store_evidence
from finetune_operator.observation.pod_identity import compute_start_key, join_pod_uids
from finetune_operator.observation.pods import PodPhase
from finetune_operator.plan.config_map import compute_config_hash
from finetune_operator.plan.run_plan import plan_run

MAX_KEPT_EVIDENCE = 8  # number of nodes per ended attempt whose evidence is kept (decisions/106)
MAX_KEPT_BYTES = 48 * 1024  # size of the evidence of all ended attempts; beyond, only root causes are kept


def build_next_attempt(context: JobContext, status: JobStatus) -> AttemptRecord:
    """Build the record of the next attempt, including the Kubernetes nodes that it avoids."""
    can_avoid = context.job.spec.restart_policy.avoid_failing_nodes and context.settings.on_cluster
    last_record = status.attempts[-1]
    # an attempt that never ran does not extend pendingDeadlineSeconds
    never_ran = last_record.running_time is None and last_record.state is AttemptState.FAILED
    pending_since = last_record.pending_since if never_ran else None
    return AttemptRecord(
        attempt=last_record.attempt + 1,
        state=AttemptState.STARTING,
        start_time=context.now,
        restart_fault=last_record.fault if last_record.state is AttemptState.FAILED else None,
        pending_since=context.now if pending_since is None else pending_since,
        avoids=find_nodes_to_avoid(status.attempts, context.now) if can_avoid else (),
    )


def record_start(context: JobContext) -> AttemptRecord:
    """Record whether all children of the current attempt were created and whether all its pods run."""
    record = context.record
    # all children exist once every pod and the Service were observed together
    live_nodes = [node for node in context.nodes if node.phase is not PodPhase.GONE]
    all_children_created = record.created or (
        len(live_nodes) == context.job.num_attempt_nodes and context.observation.service_exists
    )
    # the attempt runs once every node runs or has succeeded; a created pod is not a node before it is observed
    all_nodes_run = (
        all_children_created
        and len(context.nodes) >= context.job.num_attempt_nodes
        and all(node.phase is PodPhase.RUNNING or node.has_succeeded for node in context.nodes)
    )
    is_running = record.state is AttemptState.RUNNING or all_nodes_run
    uids = {node.node_rank: node.uid for node in live_nodes}
    update = {
        "created": all_children_created,
        "pod_uids": record.pod_uids if record.created or not all_children_created else join_pod_uids(uids),
        "state": AttemptState.RUNNING if is_running else AttemptState.STARTING,
        "running_time": record.running_time or (context.now if is_running else None),
        "spec_hash": compute_spec_hash(context.job.spec),  # replaces a hash of another release
    }
    return record.model_copy(update={**update, **summarise_steps(context)})


def with_record(status: JobStatus, record: AttemptRecord) -> JobStatus:
    """Replace the record of the current attempt in the status, and record the downtime before that attempt.

    The evidence of a large job is bounded, because etcd limits an object to 1.5 MB (decisions/409).
    """
    if record.end_time is not None:
        evidence = select_most_relevant(record.evidence, limit=MAX_KEPT_EVIDENCE)
        record = record.model_copy(update={"evidence": tuple(map(_escape_texts, evidence)), "evidence_summary": ()})
    else:
        record = store_evidence(record)
    return status.model_copy(update={"attempts": (*record_downtime(status.attempts[:-1], record), record)})


def _escape_texts(evidence: Evidence) -> Evidence:
    """Escape the control characters of the evidence of an ended attempt; the end of a log is kept."""
    texts = {name: escape_controls(value) for name, value in evidence if isinstance(value, str)}
    truncate = truncate_text if evidence.outcome else truncate_text_start
    return evidence.model_copy(update=texts | {"message": truncate(texts["message"], EVIDENCE_MESSAGE_BYTES)})


def with_next_attempt(context: JobContext, status: JobStatus, record: AttemptRecord) -> JobStatus:
    """Append the record of a new attempt to the status, with the image and hashes of the spec and the ConfigMap."""
    status = status.model_copy(update={"snapshot": renew_snapshot(context.job, context.settings)})
    job = context.job.model_copy(update={"status": status})
    run_plan = plan_run(job, attempt=record.attempt, settings=context.settings)
    update = {
        "num_nodes": job.spec.num_nodes,
        "spec_hash": compute_spec_hash(job.spec),
        "config_hash": compute_config_hash(run_plan),
        "start_key": compute_start_key(job.metadata, record.attempt, context.now),
    }
    record = record.model_copy(update=update)
    ended_attempts = (ended.model_copy(update={"pod_uids": ""}) for ended in _prune_evidence(status.attempts))
    attempts = prune_attempts((*ended_attempts, record), context.now)
    dropped = drop_attempts(status, attempts, context.now, is_command=job.spec.command is not None)
    update = {"attempt": record.attempt, "attempts": attempts, "dropped_gpu_seconds": dropped, "scheduling": None}
    return status.model_copy(update=update)


def _prune_evidence(ended_attempts: tuple[AttemptRecord, ...]) -> tuple[AttemptRecord, ...]:
    """Keep only the evidence of the root cause in older attempts once the newer ones fill MAX_KEPT_BYTES."""
    remaining_bytes = MAX_KEPT_BYTES
    kept: list[AttemptRecord] = []
    for record in reversed(ended_attempts):
        remaining_bytes -= measure_evidence_bytes(record.evidence)
        evidence = record.evidence if remaining_bytes >= 0 else select_most_relevant(record.evidence, limit=1)
        kept.append(record if evidence == record.evidence else record.model_copy(update={"evidence": evidence}))
    return tuple(reversed(kept))


def record_downtime(ended_attempts: tuple[AttemptRecord, ...], record: AttemptRecord) -> tuple[AttemptRecord, ...]:
    """Record lost steps and, after a failure, downtime on the last attempt that trained, once `record` trains again.

    See decisions/210.
    """
    trained_indexes = [index for index, ended in enumerate(ended_attempts) if ended.first_step_time is not None]
    if record.first_step_time is None or not trained_indexes:
        return ended_attempts
    last_trained = ended_attempts[trained_indexes[-1]]
    if last_trained.downtime_seconds is not None or last_trained.steps_lost is not None:
        return ended_attempts
    failure_times = [
        evidence.finished_at
        for evidence in last_trained.evidence
        if evidence.finished_at and evidence.outcome != Outcome.STOPPED
    ]
    failed_at = min(failure_times, default=last_trained.end_time)
    has_failed = last_trained.state is AttemptState.FAILED
    downtime = record.first_step_time - failed_at if failed_at and has_failed else None
    steps_lost = (last_trained.last_step or 0) - record.first_step if record.first_step is not None else None
    update = {
        "downtime_seconds": max(0, round(downtime.total_seconds())) if downtime is not None else None,
        "steps_lost": None if steps_lost is None else max(0, steps_lost),
    }
    updated = last_trained.model_copy(update=update)
    return (*ended_attempts[: trained_indexes[-1]], updated, *ended_attempts[trained_indexes[-1] + 1 :])
