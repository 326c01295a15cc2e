"""Pure decision function: derives the next status and actions from job, observation, time and settings.

An attempt moves from Starting to Running to Stopping to Failed, Stopped or Succeeded. One pass makes one step and
records it in the status, so that a crash between two API calls neither repeats nor loses a step.
"""

from datetime import datetime, timedelta

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator import names
from finetune_operator.core import deadlines
from finetune_operator.core.actions import Action, Create, DeleteConfigMap, DeleteJob, EmitEvent
from finetune_operator.core.attempt_record import record_start, with_next_attempt, with_record
from finetune_operator.core.conditions import ConditionBuilder, acknowledge_generation, keep_transition_times
from finetune_operator.core.decision import Decision, build_decision, require_confirmation
from finetune_operator.core.degradations import derive_degradations
from finetune_operator.core.ensure_children import compute_config_map_check_delay, ensure_service_and_config_map
from finetune_operator.core.group_scheduling import (
    check_group,
    compute_group_delay,
    delete_earlier_pod_groups,
    record_provider,
    waits_for_provider,
)
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS, JobContext
from finetune_operator.core.queue_group import prepare_queue_group
from finetune_operator.core.restrictions import OPERATOR_RESTRICTED, restate_restrictions
from finetune_operator.core.spec_hash import has_outdated_spec
from finetune_operator.core.stop_attempt import (
    StopReason,
    begin_stopping,
    cancel_job,
    complete_job,
    continue_stopping,
    end_attempt,
)
from finetune_operator.core.succeeded_nodes import compute_record_delay, record_successes
from finetune_operator.core.suspend_and_resume import keep_job_suspended, resume_job, suspend_before_start
from finetune_operator.failures.create_rejections import find_permanent_rejection
from finetune_operator.failures.rules import judge_node
from finetune_operator.observation.pods import NodeObservation, Observation, PodPhase
from finetune_operator.plan.config_map import compute_config_hash
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import RunPlan, plan_run
from finetune_operator.settings import Settings

REQUEUE_INTERVAL = timedelta(seconds=5)
QUOTA_RELEASE_DELAY = timedelta(seconds=30)


def decide(job: FineTuneJob, observation: Observation, now: datetime, settings: Settings) -> Decision:
    """Decide the next step of a job.

    The function is deterministic; deciding again after the actions were executed changes nothing.
    """
    context = JobContext(job, observation, now, settings)
    # if the job is being deleted, leave its children to the garbage collector, which waits for Kueue's finalizer
    if job.metadata.deletion_timestamp is not None:
        return Decision(job.status, context.release_quota())
    # if the job has finished, delete leftover pods, and the job after its TTL
    if job.status.completion_time is not None:
        return _clean_up_finished_job(context)
    # if the job is new, begin attempt 0, unless spec.suspend is set; a cancelled attempt ends before it creates a pod
    if not job.status.attempts:
        is_suspended = job.spec.suspend and not job.spec.cancel
        return suspend_before_start(context) if is_suspended else _begin_first_attempt(context)
    # otherwise continue with the current attempt
    match context.record.state:
        case AttemptState.STARTING | AttemptState.RUNNING:
            return _continue_attempt(context)
        case AttemptState.STOPPING:
            return continue_stopping(context)
        case AttemptState.STOPPED:
            if job.spec.cancel:
                return cancel_job(context, context.record)
            return keep_job_suspended(context) if job.spec.suspend else resume_job(context)
        case AttemptState.SUCCEEDED | AttemptState.FAILED:
            raise AssertionError("the write that ends an attempt also begins the next one or finishes the job")


def _begin_first_attempt(context: JobContext) -> Decision:
    record = AttemptRecord(attempt=0, state=AttemptState.STARTING, start_time=context.now, pending_since=context.now)
    status = context.status.model_copy(update={"start_time": context.now, "suspend_time": None})
    return build_decision(context, with_next_attempt(context, status, record))


def _continue_attempt(context: JobContext) -> Decision:
    """Run the checks of a starting or running attempt in order; the first decision applies."""
    for step in (
        # the user or a deadline stops the attempt
        _check_stop_request,
        # a child can never be created
        _check_rejected_children,
        # Kueue ignores the pods of a job with a queue, or cannot admit them
        check_group,
        # all nodes have succeeded
        _check_success,
        # nodes failed only because others cannot start
        _check_incomplete_gang,
        # a node failed or disappeared
        _check_failure,
        # nodes did not start in time
        _check_start_deadlines,
        # children are missing
        _create_missing_children,
        # the pending reason has timed out
        _check_pending_timeout,
    ):
        decision = step(context)
        if decision is not None:
            return decision
    # if nothing is to be stopped or created, record whether the attempt runs
    return _update_running_state(context)


def _check_stop_request(context: JobContext) -> Decision | None:
    """Stop the attempt if spec.cancel is set, spec.suspend is or was set, or activeDeadlineSeconds has expired."""
    if context.job.spec.cancel:
        return begin_stopping(context, StopReason.CANCELLED)
    if context.job.spec.suspend:
        return begin_stopping(context, StopReason.SUSPENDED)
    # only a suspended job can be changed, so the operator missed the suspension; the next attempt uses the new spec
    if has_outdated_spec(context.record, context.job.spec):
        return begin_stopping(context, StopReason.SUSPENDED, message="the spec was changed while the job was suspended")
    active_deadline = deadlines.active_deadline(context)
    if active_deadline is not None and context.now >= active_deadline:
        return begin_stopping(context, StopReason.DEADLINE)
    return None


def _check_rejected_children(context: JobContext) -> Decision | None:
    """End the attempt if a child can never be created, for example because its name is taken."""
    verdict = find_permanent_rejection(context.job, context.observation)
    return end_attempt(context, verdict, context.record) if verdict else None


def _check_success(context: JobContext) -> Decision | None:
    """Complete the job if every node succeeded."""
    nodes = context.nodes
    if len(nodes) < context.job.num_attempt_nodes or not all(node.has_succeeded for node in nodes):
        return None
    return complete_job(context, context.record)


def _check_incomplete_gang(context: JobContext) -> Decision | None:
    """Stop the attempt, without a failure, if nodes left the rendezvous because others cannot start (decisions/206)."""
    pending_reason = context.pending_reason
    if pending_reason is None or not pending_reason.has_no_timeout:
        return None
    ended_nodes = [node for node in context.nodes if node.phase not in (PodPhase.PENDING, PodPhase.RUNNING)]
    only_victims = all(node.phase is PodPhase.FAILED and judge_node(node.evidence).victim for node in ended_nodes)
    if not ended_nodes or not only_victims:
        return None
    message = f"running nodes gave up waiting for others: {pending_reason.message}"
    return begin_stopping(context, StopReason.INCOMPLETE, message=message)


def _check_failure(context: JobContext) -> Decision | None:
    """Stop the attempt if a node failed, is being deleted, lost its labels, or disappeared after creation."""
    unsuccessful_nodes = [node for node in context.nodes if not node.has_succeeded]
    if any(node.was_restarted or node.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED) for node in unsuccessful_nodes):
        return begin_stopping(context, StopReason.NODE_FAILED)
    if any(
        node.is_relabelled or (node.is_terminating and node.phase is not PodPhase.GONE) for node in unsuccessful_nodes
    ):
        return begin_stopping(context, StopReason.NODE_DELETED)
    num_known_nodes = len(context.nodes) + len(context.find_expected_pods())
    # no node of a group succeeds before all pods have existed, even if the operator did not run then
    is_group = context.status.scheduling is not None
    were_created = context.record.created or (is_group and any(node.has_succeeded for node in context.nodes))
    is_pod_missing = were_created and num_known_nodes < context.job.num_attempt_nodes
    # a deleted pod is never recreated under its name, so the attempt has to end
    if is_pod_missing or any(node.phase is PodPhase.GONE for node in unsuccessful_nodes):
        return require_confirmation(context, begin_stopping(context, StopReason.NODE_FAILED))
    return None


def _create_missing_children(context: JobContext) -> Decision | None:
    """Create missing children once no pod of an older attempt can run and the restart delay has passed."""
    record = context.record
    if record.created:
        return None
    # first stop the pods of older attempts (fencing)
    older_pods = _find_pods_of_older_attempts(context)
    blocking_pods = [node for node in older_pods if node.may_run(context.now)]
    if blocking_pods:
        deletions = context.build_deletions(blocking_pods, ABORT_GRACE_SECONDS)
        return build_decision(context, context.status, actions=deletions, requeue_after=REQUEUE_INTERVAL)
    # also wait for the pods of a deleted job of the same name, which write the same output
    if any(node.may_run(context.now) for node in context.observation.predecessor_nodes):
        return build_decision(context, context.status, requeue_after=REQUEUE_INTERVAL)
    # then choose what schedules the pods as a group
    if waits_for_provider(context):
        return record_provider(context)
    # then leave the queue's group if Kueue would not accept the new pods in it
    if (group_actions := prepare_queue_group(context, older_pods)) is not None:
        return build_decision(context, context.status, actions=group_actions, requeue_after=REQUEUE_INTERVAL)
    # then wait until the restart delay has passed, and that of creates which the API server rejected
    delay = max(_compute_remaining_delay(record, context.now), context.observation.create_delay)
    if delay > timedelta():
        return build_decision(context, context.status, requeue_after=delay)
    # then create the missing children, unless another release created the others
    existing_pods = {node.pod_name for node in context.nodes if node.phase is not PodPhase.GONE}
    existing_pods |= context.find_expected_pods()
    if len(existing_pods) == context.job.num_attempt_nodes and context.observation.service_exists:
        return None
    # the cache may not contain a pod of an older attempt, or a pod that the last pass created (decisions/101)
    if not context.observation.is_fresh:
        return require_confirmation(context, build_decision(context, context.status))
    return _create_children(context, existing_pods, older_pods)


def _create_children(context: JobContext, existing_pods: set[str], older_pods: list[NodeObservation]) -> Decision:
    """Create the missing children of an attempt, and delete what is left of older ones."""
    record = context.record
    run_plan = plan_run(context.job, attempt=record.attempt, settings=context.settings)
    config_hash = compute_config_hash(run_plan)
    if existing_pods and record.config_hash != config_hash:
        # these pods verify the ConfigMap of that release (decisions/310)
        message = "another release of the operator began to create the pods"
        return begin_stopping(context, StopReason.SUSPENDED, message=message)
    actions = _build_creations(context, run_plan, existing_pods)
    # finally delete the ConfigMap of the last attempt and the pods of older attempts
    if record.attempt > 0:
        metadata = context.job.metadata
        old_config_map = names.config_map_name(metadata.name, metadata.uid, record.attempt - 1)
        deletions = context.build_deletions(older_pods, ABORT_GRACE_SECONDS)
        actions = (*actions, DeleteConfigMap(old_config_map), *delete_earlier_pod_groups(context), *deletions)
    status = with_record(context.status, record.model_copy(update={"config_hash": config_hash}))
    return build_decision(context, status, actions=actions, requeue_after=compute_config_map_check_delay(context))


def _build_creations(context: JobContext, run_plan: RunPlan, existing_pods: set[str]) -> tuple[Action, ...]:
    """Return the actions that create the missing children; an edited Service is deleted first."""
    actions: tuple[Action, ...] = tuple(
        Create(child)
        for child in build_children(run_plan)
        if child["metadata"]["name"] not in existing_pods
        and (child["kind"] != "Service" or not context.observation.service_exists)
    )
    return (*actions, *ensure_service_and_config_map(context)) if context.observation.edited_service_uid else actions


def _compute_remaining_delay(record: AttemptRecord, now: datetime) -> timedelta:
    """Return the remaining restart delay; zero if the record was written with a faster clock."""
    if record.not_before is None or (record.start_time and now < record.start_time):
        return timedelta()
    return record.not_before - now


def _check_pending_timeout(context: JobContext) -> Decision | None:
    """End the attempt if the image pull or the container creation has timed out."""
    reported = context.status.waiting
    timeout_at = deadlines.pending_timeout_at(context, reported)
    if reported is None or timeout_at is None or context.now < timeout_at:
        return None
    if (pending_reason := context.pending_reason) and pending_reason.verdict is not None:
        return end_attempt(context, pending_reason.verdict, context.record)
    return begin_stopping(context, StopReason.IMAGE, message=reported.message)


def _check_start_deadlines(context: JobContext) -> Decision | None:
    """Fail a job whose nodes do not all start in time, or release nodes that wait for others."""
    reported = context.status.waiting
    pending_deadline = deadlines.pending_deadline(context)
    if pending_deadline is not None and context.now >= pending_deadline:
        cause = f": {reported.message}" if reported else ""
        limit = context.job.spec.pending_deadline_seconds
        message = f"not all nodes ran within pendingDeadlineSeconds ({limit} s){cause}"
        return begin_stopping(context, StopReason.PENDING, message=message)
    release_time = deadlines.release_time(context)
    if release_time is None or context.now < release_time or reported is None:
        return None
    limit = context.job.spec.startup_deadline_seconds
    message = f"released after startupDeadlineSeconds ({limit} s), so that no GPU stays idle: {reported.message}"
    return begin_stopping(context, StopReason.INCOMPLETE, message=message)


def _update_running_state(context: JobContext) -> Decision:
    """Record whether all pods exist and run, and restore a missing Service or ConfigMap."""
    record = record_successes(record_start(context), context.nodes, context.now)
    # emit events, delete pods of older attempts, restore Service and ConfigMap
    deletions = context.build_deletions(_find_pods_of_older_attempts(context), ABORT_GRACE_SECONDS)
    status = with_record(context.status, record)
    events = (*_build_start_events(context, record), *_build_degradation_events(context, status))
    create_delay = context.observation.create_delay or None
    restorations = () if create_delay else ensure_service_and_config_map(context)
    actions = (*events, *deletions, *restorations)
    # requeue for the next ConfigMap check or the record of a success
    delays = (
        create_delay,
        compute_config_map_check_delay(context),
        compute_record_delay(context.nodes, context.now),
        compute_group_delay(context),
    )
    requeue_after = min((delay for delay in delays if delay is not None), default=None)
    return build_decision(context, status, actions=actions, requeue_after=requeue_after)


def _build_degradation_events(context: JobContext, status: JobStatus) -> tuple[Action, ...]:
    """Return one event per reason that newly slows the attempt down."""
    recorded_reasons = {each.reason for each in context.status.degraded}
    degraded = derive_degradations(status, context.observation.degraded)
    return tuple(
        EmitEvent("Warning", each.reason, each.message, f"degraded-{status.attempt}-{each.reason}")
        for each in degraded
        if each.reason not in recorded_reasons
    )


def _build_start_events(context: JobContext, record: AttemptRecord) -> tuple[Action, ...]:
    """Return the events of a starting attempt: one per new pending reason, and one when the attempt runs."""
    if record.state is AttemptState.RUNNING:
        if context.record.state is AttemptState.RUNNING:
            return ()
        message = f"attempt {record.attempt} runs on {context.job.num_attempt_nodes} nodes"
        return (EmitEvent("Normal", Reason.RUNNING, message, f"running-{record.attempt}"),)
    pending_reason, reported = context.pending_reason, context.status.waiting
    if pending_reason is not None and (reported is None or reported.reason != pending_reason.reason):
        event_type = "Normal" if pending_reason.expected else "Warning"
        key = f"waiting-{record.attempt}-{pending_reason.reason}"
        return (EmitEvent(event_type, pending_reason.reason, pending_reason.message, key),)
    return ()


def _find_pods_of_older_attempts(context: JobContext) -> list[NodeObservation]:
    return [node for node in context.observation.live_nodes() if node.attempt != context.record.attempt]


def _restate_finished_job(context: JobContext) -> JobStatus:
    """Return the status of a finished job with its current generation and restrictions.

    Missing rights stay stated while they are missing. They are first stated by the pass that failed without them.
    """
    generation = context.job.metadata.generation
    status = acknowledge_generation(context.status, generation)
    is_stated = any(condition.type == OPERATOR_RESTRICTED for condition in status.conditions)
    conditions = restate_restrictions(
        status.conditions,
        ConditionBuilder(generation, context.now),
        context.observation.missing_rights if is_stated else (),
        ignores_ttl=context.ignores_ttl,
    )
    return status.model_copy(update={"conditions": keep_transition_times(conditions, status.conditions)})


def _clean_up_finished_job(context: JobContext) -> Decision:
    """Delete the running pods of a finished job, and the job itself after its TTL; the result in the status stays."""
    status = _restate_finished_job(context)
    kept_by_sidecars, requeue_after = context.find_pods_kept_by_sidecars()
    actions = context.build_deletions([*context.running_pods(), *kept_by_sidecars], ABORT_GRACE_SECONDS)
    ttl, ended = context.ttl_seconds, context.status.completion_time
    # Kueue itself releases a group whose pods have all succeeded, and keeps their objects and logs
    is_complete = any(record.state is AttemptState.SUCCEEDED for record in context.status.attempts[-1:])
    if not is_complete or ended is None or context.now - ended > QUOTA_RELEASE_DELAY:
        actions += context.release_quota()
    elif context.job.spec.scheduling is not None:
        requeue_after = min(QUOTA_RELEASE_DELAY, requeue_after or QUOTA_RELEASE_DELAY)
    if ttl is None or ended is None:
        return Decision(status, actions, requeue_after=requeue_after)
    remaining = ended + timedelta(seconds=ttl) - context.now
    if remaining > timedelta():
        return Decision(status, actions, requeue_after=min(remaining, requeue_after or remaining))
    return Decision(status, (*actions, DeleteJob(context.job.metadata.uid)))
