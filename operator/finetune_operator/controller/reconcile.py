"""One reconcile pass: observe, decide, write the status, execute the actions. All logic is in core.decide."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from pydantic import ValidationError

from finetune_api.oom_repair import explain_unsupported_repair
from finetune_api.schema.status_schema import bound_status
from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.job import FineTuneJob, ObjectMeta
from finetune_api.v1alpha1.status import AttemptState, JobStatus
from finetune_operator import names
from finetune_operator.controller.execute_actions import execute_actions, select_executed_actions
from finetune_operator.controller.gather import (
    CachedState,
    is_first_start,
    observe_cached,
    observe_uncached,
)
from finetune_operator.controller.identity_cache import IdentityCache
from finetune_operator.controller.job_cache import MAX_PARSED_JOBS
from finetune_operator.controller.observe_group import observe_group
from finetune_operator.core.actions import Action, Create, DeletePod, EmitEvent
from finetune_operator.core.conditions import ConditionBuilder, keep_transition_times
from finetune_operator.core.decide import decide
from finetune_operator.core.decision import Decision
from finetune_operator.core.degraded import decide_degraded
from finetune_operator.core.invalid_spec import decide_invalid_spec
from finetune_operator.core.restrictions import restate_restrictions
from finetune_operator.core.write_delay import compute_write_delay
from finetune_operator.kube.cluster import Cluster, ClusterError, Conflict
from finetune_operator.observation.ownership import JobOwner, RawBody, select_children
from finetune_operator.observation.pod_identity import join_pod_uids
from finetune_operator.observation.pods import Observation, RejectedCreate
from finetune_operator.settings import Settings

_STATUS_FIELDS = frozenset(field.alias or name for name, field in JobStatus.model_fields.items())
# Limits requeue delays, because they are computed from the wall clock, which may be corrected meanwhile.
MAX_REQUEUE_AFTER = timedelta(minutes=5)
_parse_job = IdentityCache(FineTuneJob.parse, max_entries=MAX_PARSED_JOBS)


@dataclass(frozen=True)
class PassResult:
    """Result of one reconcile pass, with the newest body of the job."""

    job: RawBody
    requeue_after: timedelta | None = None
    rejected_creates: tuple[RejectedCreate, ...] = ()  # of this pass, or of an earlier one whose retry is delayed
    has_tried_creates: bool = False
    actions: tuple[Action, ...] = ()  # that were executed
    pod_uids: Mapping[str, str] = field(default_factory=dict)  # of the created pods by name


@dataclass(frozen=True)
class PassDependencies:
    """Dependencies that all passes share: cluster, operator settings and wall clock."""

    cluster: Cluster
    settings: Settings
    now: Callable[[], datetime]
    report_status: Callable[[ObjectMeta, JobStatus], None] | None = None  # called with the status after each pass


async def reconcile(dependencies: PassDependencies, job: RawBody, cached: CachedState) -> PassResult:
    """Run one reconcile pass for a job. After a ClusterError the pass can be repeated from the start.

    Raises:
        ClusterError: The API server rejected a request that has to be retried, or did not respond.
    """
    cluster, settings, now = dependencies.cluster, dependencies.settings, dependencies.now
    # Parse the spec; an invalid one fails the job, unless it has begun.
    try:
        parsed = _parse_job(job)
    except ValidationError as error:
        return await _handle_invalid_spec(dependencies, job, error, cached)
    if problem := explain_unsupported_repair(parsed.status.repair):
        return await reconcile_degraded(dependencies, job, cached, problem=problem)
    current_status, parsed = parsed.status, _with_known_creation(parsed, cached)
    # Observe and decide from the caches; repeat with uncached reads if a stale cache could mislead the decision.
    observation = await observe_group(cluster, parsed, observe_cached(parsed, cached), settings)
    decision = decide(parsed, observation, now(), settings)
    if decision.needs_confirmation:
        observation = await observe_uncached(cluster, parsed, observation, cached)
        decision = decide(parsed, observation, now(), settings)
    # Postpone a cosmetic status write, such as new progress, if the last write was a short time ago.
    if delay := _compute_write_delay(current_status, decision, observation, cached, now()):
        await execute_actions(cluster, parsed.metadata, decision.actions, now=now())
        return PassResult(job, min(delay, decision.requeue_after or delay), actions=decision.actions)
    status = _bound_new_status(decision.status, current_status)
    has_changed = status != current_status
    # Write the status before acting: if this process dies in between, the next pass repeats nothing.
    if has_changed:
        job = await cluster.write_status(job, _keep_unknown_fields(job, render_status(status)))
    elif _deletes_pod_of_newer_attempt(parsed, decision, observation):
        await _check_version(cluster, job)
    _report_status(dependencies, parsed.metadata, status)
    # If the write began the next attempt, also decide its first step.
    first_step = _decide_first_step(dependencies, job, current_status, observation) if has_changed else None
    actions = decision.actions if first_step is None else (*decision.actions, *first_step.actions)
    # Execute the actions. After a status write, requeue at once, because no event triggers the next step.
    creations = await execute_actions(
        cluster, parsed.metadata, actions, now=now(), last_rejection=cached.last_rejection
    )
    has_tried_creates = any(isinstance(action, Create) for action in actions)
    is_waiting = bool(cached.create_delay) and not has_tried_creates and _continues_attempt(current_status, status)
    rejected_creates = cached.rejected_creates if is_waiting else creations.rejected
    should_requeue_now = (has_changed and first_step is None) or rejected_creates != cached.rejected_creates
    requeue_after = timedelta() if should_requeue_now else (first_step or decision).requeue_after
    requeue_after = requeue_after and min(requeue_after, MAX_REQUEUE_AFTER)
    executed_actions = select_executed_actions(actions, creations)
    return PassResult(job, requeue_after, rejected_creates, has_tried_creates, executed_actions, creations.pod_uids)


def _continues_attempt(old_status: JobStatus, new_status: JobStatus) -> bool:
    """Return whether the status is still that of a starting or running attempt."""
    is_active = new_status.attempts and new_status.attempts[-1].state in (AttemptState.STARTING, AttemptState.RUNNING)
    return bool(is_active) and old_status.attempt == new_status.attempt


def _report_status(dependencies: PassDependencies, job: ObjectMeta, status: JobStatus) -> None:
    """Report the written status to the notifier, before the actions of the pass, which may fail."""
    if dependencies.report_status is not None:
        dependencies.report_status(job, status)


def _with_known_creation(job: FineTuneJob, cached: CachedState) -> FineTuneJob:
    """Return the job with the record that all pods exist, if this process created them and has not written that yet.

    A rejected create, such as that of a Service whose name is taken, may end the attempt before all its objects exist.
    """
    attempts = job.status.attempts
    if not attempts or attempts[-1].created or attempts[-1].state is not AttemptState.STARTING:
        return job
    if cached.rejected_creates:
        return job
    name, attempt = job.metadata.name, attempts[-1].attempt
    uids = {
        rank: cached.created_pods.get(names.pod_name(name, attempt, rank), "") for rank in range(job.num_attempt_nodes)
    }
    if not all(uids.values()):
        return job
    record = attempts[-1].model_copy(update={"created": True, "pod_uids": join_pod_uids(uids)})
    status = job.status.model_copy(update={"attempts": (*attempts[:-1], record)})
    return job.model_copy(update={"status": status})


def _decide_first_step(
    dependencies: PassDependencies, job: RawBody, last_status: JobStatus, observation: Observation
) -> Decision | None:
    """Decide the first step of an attempt that the last status write began; None if another pass has to decide it.

    The LIST that confirmed the end of the last attempt is still valid: none of its pods can run again, and no pod of
    the new attempt existed before the status write.
    """
    parsed = _parse_job(job)
    is_next_attempt = last_status.attempt is not None and parsed.status.attempt == last_status.attempt + 1
    if not is_next_attempt or not observation.is_fresh or is_first_start(parsed):
        return None
    if parsed.spec.scheduling is not None:  # this pass has not read what schedules the pods as a group
        return None
    decision = decide(parsed, replace(observation, rejected_creates=()), dependencies.now(), dependencies.settings)
    return decision if decision.status == parsed.status else None


def _compute_write_delay(
    current_status: JobStatus, decision: Decision, observation: Observation, cached: CachedState, now: datetime
) -> timedelta | None:
    """Return how long to postpone the write of the status; None to write it now, or if it has not changed.

    No write is postponed before an object is created or deleted: it fails if another operator wrote the status.
    """
    changes_objects = any(not isinstance(action, EmitEvent) for action in decision.actions)
    if decision.status == current_status or cached.time_since_status_write is None or changes_objects:
        return None
    attempt = decision.status.attempt
    nodes = () if attempt is None else observation.nodes_of_attempt(attempt)
    return compute_write_delay(current_status, decision.status, nodes, now, since_write=cached.time_since_status_write)


def _deletes_pod_of_newer_attempt(job: FineTuneJob, decision: Decision, observation: Observation) -> bool:
    """Return whether a pod to be deleted seems to belong to a later attempt than the current one.

    Either another operator has begun that attempt, and the cached job is outdated, or another user created the pod.
    """
    newer_uids = {node.uid for node in observation.nodes if node.attempt > (job.status.attempt or 0)}
    return any(isinstance(action, DeletePod) and action.uid in newer_uids for action in decision.actions)


async def _check_version(cluster: Cluster, job: RawBody) -> None:
    """Read the job and compare its version.

    Raises:
        Conflict: The job was modified or deleted.
    """
    metadata = job["metadata"]
    newest = await cluster.get(names.FINETUNEJOB_KIND, metadata["namespace"], metadata["name"])
    if newest is None or newest["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
        raise Conflict(f"{metadata['name']} was modified after it was read")


def _bound_new_status(new_status: JobStatus, current_status: JobStatus) -> JobStatus:
    """Bound a changed status, because the API server rejects a status that exceeds the bounds of the CRD."""
    return new_status if new_status == current_status else bound_status(new_status)


def render_status(status: JobStatus) -> RawBody:
    """Serialize the status in camelCase without empty fields, except `restarts`, which kubectl prints in a column."""
    body: RawBody = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return {**body, "restarts": status.restarts}


def _keep_unknown_fields(job: RawBody, status: RawBody) -> RawBody:
    """Return the new status with the fields of the job's status that only a newer release knows."""
    unknown = {name: value for name, value in (job.get("status") or {}).items() if name not in _STATUS_FIELDS}
    return {**unknown, **status}


async def _handle_invalid_spec(
    dependencies: PassDependencies, job: RawBody, error: ValidationError, cached: CachedState
) -> PassResult:
    """Fail a job whose spec cannot be parsed, and delete it after its TTL.

    One that has begun continues: another release accepted its spec.
    """
    status = _parse_status(job)
    if status.attempts or status.completion_time is not None:
        return await reconcile_degraded(dependencies, job, cached, problem=explain_validation_error(error))
    metadata = ObjectMeta.model_validate(job["metadata"])
    if metadata.deletion_timestamp is not None:
        return PassResult(job)
    decision = decide_invalid_spec(status, error, dependencies.now(), generation=metadata.generation)
    return await _carry_out(dependencies, job, status, decision)


async def reconcile_degraded(
    dependencies: PassDependencies, job: RawBody, cached: CachedState, *, problem: str
) -> PassResult:
    """Apply suspend, active deadline and TTL to a job that cannot be reconciled, and state the problem."""
    status = _parse_status(job)
    if job["metadata"].get("deletionTimestamp") is not None:
        return PassResult(job)
    pods = select_children(JobOwner(job["metadata"]["name"], job["metadata"]["uid"]), cached.pods)
    decision = decide_degraded(job, status, pods, dependencies.now(), problem=problem, settings=dependencies.settings)
    return await _carry_out(dependencies, job, status, decision)


async def state_missing_rights(dependencies: PassDependencies, job: RawBody, rights: Sequence[str]) -> PassResult:
    """State in a condition of the job which rights the operator lacks, after a pass that failed without them."""
    status, settings = _parse_status(job), dependencies.settings
    has_ttl = (job.get("spec") or {}).get("ttlSecondsAfterFinished") is not None
    ignores_ttl = has_ttl and not settings.delete_finished_jobs
    builder = ConditionBuilder(job["metadata"].get("generation", 0), dependencies.now())
    conditions = restate_restrictions(status.conditions, builder, rights, ignores_ttl=ignores_ttl)
    update = {"conditions": keep_transition_times(conditions, status.conditions)}
    return await _carry_out(dependencies, job, status, Decision(status.model_copy(update=update)))


async def _carry_out(dependencies: PassDependencies, job: RawBody, status: JobStatus, decision: Decision) -> PassResult:
    new_status = _bound_new_status(decision.status, status)
    if new_status != status:
        job = await dependencies.cluster.write_status(job, _keep_unknown_fields(job, render_status(new_status)))
    metadata = ObjectMeta.model_validate(job["metadata"])
    _report_status(dependencies, metadata, new_status)
    await execute_actions(dependencies.cluster, metadata, decision.actions, now=dependencies.now())
    return PassResult(job, decision.requeue_after)


def _parse_status(job: RawBody) -> JobStatus:
    try:
        return JobStatus.model_validate(job.get("status") or {})
    except ValidationError as error:  # written by another release of the operator
        problems = explain_validation_error(error, parent_path="status")
        raise ClusterError(f"status cannot be read, the job is left alone: {problems}") from error
