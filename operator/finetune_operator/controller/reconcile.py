"""One reconcile pass: observe, decide, write the status, execute the actions. All logic is in core.decide."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.job import FineTuneJob, ObjectMeta
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Progress
from finetune_operator import names
from finetune_operator.core.actions import Action, Create, DeleteConfigMap, DeleteJob, DeletePod, DeleteService, Emit
from finetune_operator.core.conditions import without_cosmetic_fields
from finetune_operator.core.decide import decide
from finetune_operator.core.invalid_spec import decide_invalid
from finetune_operator.core.pending import claim_names
from finetune_operator.kube.cluster import Cluster, ClusterError, CreateRejected, NameTaken, ObjectRef
from finetune_operator.observation.ownership import RawBody, controller_uid
from finetune_operator.observation.pods import Claim, Observation, RejectedCreate, observe_pods
from finetune_operator.plan.manifests import is_intact_headless_service
from finetune_operator.settings import Settings

STATUS_WRITE_INTERVAL = timedelta(seconds=5)
# The delay is computed from the wall clock, which may be corrected meanwhile, but elapses on the monotonic clock.
MAX_REQUEUE_AFTER = timedelta(minutes=5)


@dataclass(frozen=True)
class CachedState:
    """What the caches contain about one job; `deleted_pods` are last known objects."""

    pods: tuple[RawBody, ...] = ()
    deleted_pods: tuple[RawBody, ...] = ()
    services: tuple[RawBody, ...] = ()
    progress: Progress | None = None
    unreachable_endpoint: str = ""  # host:port that has not answered progress polls for long
    rejected_creates: tuple[RejectedCreate, ...] = ()  # of the last pass
    since_status_write: timedelta | None = None  # None if this process has not written the status yet


@dataclass(frozen=True)
class PassResult:
    """Result of a pass: the newest job, when to requeue it, and the creates that the API server rejected."""

    job: RawBody
    requeue_after: timedelta | None = None
    rejected_creates: tuple[RejectedCreate, ...] = ()


@dataclass(frozen=True)
class PassDependencies:
    """What every pass uses: the cluster, the settings of the operator and the wall clock."""

    cluster: Cluster
    settings: Settings
    now: Callable[[], datetime]


async def reconcile(dependencies: PassDependencies, job: RawBody, cached: CachedState) -> PassResult:
    """Run one pass over one job. After a ClusterError the pass can be repeated from the start.

    Raises:
        ClusterError: The API server rejected a request that has to be retried, or did not answer.
    """
    cluster, settings, now = dependencies.cluster, dependencies.settings, dependencies.now
    # Parse the spec; an invalid one fails the job.
    try:
        parsed = FineTuneJob.parse(job)
    except ValidationError as error:
        return await _handle_invalid_spec(dependencies, job, error, cached)
    # Observe and decide from the caches; confirm with uncached reads what a stale cache must not trigger.
    observation = _observe(parsed, cached)
    decision = decide(parsed, observation, now(), settings)
    if decision.needs_confirmation:
        observation = await _observe_uncached(cluster, parsed, observation, cached)
        decision = decide(parsed, observation, now(), settings)
    # Postpone a cosmetic status write, such as new progress, if the last write was a moment ago.
    changed = decision.status != parsed.status
    if changed and (delay := _status_write_delay(parsed.status, decision.status, cached)):
        rejected_creates = await _execute_actions(dependencies, parsed.metadata, decision.actions)
        return PassResult(job, min(delay, decision.requeue_after or delay), rejected_creates)
    # Write the status before acting: if this process dies in between, the next pass repeats nothing.
    if changed:
        job = await cluster.write_status(job, render_status(decision.status))
    # Act. After a status write, requeue at once: the next step waits for no event.
    rejected_creates = await _execute_actions(dependencies, parsed.metadata, decision.actions)
    requeue_now = changed or rejected_creates != cached.rejected_creates
    requeue_after = timedelta() if requeue_now else decision.requeue_after
    return PassResult(job, requeue_after and min(requeue_after, MAX_REQUEUE_AFTER), rejected_creates)


def _status_write_delay(before: JobStatus, after: JobStatus, cached: CachedState) -> timedelta | None:
    """Return how long to postpone a write that changes cosmetic fields only; None to write now."""
    if cached.since_status_write is None or cached.since_status_write >= STATUS_WRITE_INTERVAL:
        return None
    if without_cosmetic_fields(before) != without_cosmetic_fields(after):
        return None
    return STATUS_WRITE_INTERVAL - cached.since_status_write


def render_status(status: JobStatus) -> RawBody:
    """Serialize the status in camelCase without empty fields, but with `restarts` 0 for its kubectl column."""
    body: RawBody = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return {**body, "restarts": status.restarts}


def _observe(job: FineTuneJob, cached: CachedState) -> Observation:
    record = job.status.attempts[-1] if job.status.attempts else None
    progress = cached.progress
    if progress and record and record.start_time and progress.update_time and progress.update_time < record.start_time:
        progress = None  # of an earlier attempt
    uid = job.metadata.uid
    services = _controlled_by(uid, cached.services)
    edited = (service["metadata"]["uid"] for service in services if not is_intact_headless_service(service, uid))
    return Observation(
        nodes=observe_pods(_controlled_by(uid, cached.pods), _controlled_by(uid, cached.deleted_pods)),
        service_exists=any(is_intact_headless_service(service, uid) for service in services),
        edited_service_uid=next(edited, ""),
        progress=progress,
        unreachable_endpoint=cached.unreachable_endpoint,
        rejected_creates=cached.rejected_creates,
    )


async def _observe_uncached(
    cluster: Cluster, job: FineTuneJob, observation: Observation, cached: CachedState
) -> Observation:
    """Return the observation with freshly listed pods and, while the attempt starts, the access modes of its claims."""
    namespace, uid = job.metadata.namespace, job.metadata.uid
    is_starting = job.status.attempts[-1].state is AttemptState.STARTING
    claims_request = _get_all(cluster, "PersistentVolumeClaim", namespace, claim_names(job) if is_starting else ())
    listed_pods, claims = await asyncio.gather(cluster.list_pods(namespace, uid), claims_request)
    # A pod that is in the cache but not in the list was deleted: the cached object is its last known one.
    deleted = _controlled_by(uid, (*cached.deleted_pods, *cached.pods))
    listed = replace(observation, nodes=observe_pods(_controlled_by(uid, listed_pods), deleted))
    unlisted_pods = await _get_all(cluster, "Pod", namespace, _unlisted_pod_names(job, listed))
    return replace(
        observation,
        nodes=observe_pods(_controlled_by(uid, (*listed_pods, *unlisted_pods)), deleted),
        claims=tuple(
            Claim(claim["metadata"]["name"], tuple(claim.get("spec", {}).get("accessModes") or ())) for claim in claims
        ),
        fresh=True,
    )


async def _get_all(cluster: Cluster, kind: str, namespace: str, object_names: Iterable[str]) -> list[RawBody]:
    bodies = await asyncio.gather(*(cluster.get(kind, namespace, name) for name in object_names))
    return [body for body in bodies if body is not None]


def _unlisted_pod_names(job: FineTuneJob, listed: Observation) -> list[str]:
    """Return pods of the current attempt that are not listed, although they were not observed to end or be deleted.

    Somebody may have removed their labels, so that no selector matches them; a GET by name still finds them.
    """
    record = job.status.attempts[-1]
    if not record.created and record.state is not AttemptState.STOPPING:
        return []
    observed_ranks = {node.node_rank for node in listed.nodes_of_attempt(record.attempt) if not node.disappeared}
    ranks = range(len(record.evidence) or job.spec.num_nodes)
    return [names.pod_name(job.metadata.name, record.attempt, rank) for rank in ranks if rank not in observed_ranks]


def _controlled_by(uid: str, bodies: Iterable[RawBody]) -> list[RawBody]:
    return [body for body in bodies if controller_uid(body) == uid]


async def _execute_actions(
    dependencies: PassDependencies, job: ObjectMeta, actions: tuple[Action, ...]
) -> tuple[RejectedCreate, ...]:
    """Execute the actions concurrently, pod creates last; none if a foreign ConfigMap has the name they would mount."""
    others = [action for action in actions if not _creates_pod(action)]
    pod_creates = [action for action in actions if _creates_pod(action)]
    rejected_creates = await _execute_all(dependencies, job, others)
    if any(rejected.kind == "ConfigMap" for rejected in rejected_creates):
        return rejected_creates
    return (*rejected_creates, *await _execute_all(dependencies, job, pod_creates))


def _creates_pod(action: Action) -> bool:
    return isinstance(action, Create) and action.manifest["kind"] == "Pod"


async def _execute_all(
    dependencies: PassDependencies, job: ObjectMeta, actions: list[Action]
) -> tuple[RejectedCreate, ...]:
    """Execute all actions and return the rejected creates. Other errors are raised after all actions have ended."""
    results = await asyncio.gather(*(_execute(dependencies, job, action) for action in actions), return_exceptions=True)
    rejected_creates = []
    for result in results:
        if isinstance(result, NameTaken):
            rejected_creates.append(
                RejectedCreate(
                    result.kind,
                    result.name,
                    409,
                    str(result),
                    name_taken=not result.predecessor_terminating,
                    predecessor_terminating=result.predecessor_terminating,
                )
            )
        elif isinstance(result, CreateRejected):
            rejected_creates.append(RejectedCreate(result.kind, result.name, result.status, result.message))
        elif isinstance(result, BaseException):
            raise result
    return tuple(rejected_creates)


async def _execute(dependencies: PassDependencies, job: ObjectMeta, action: Action) -> None:
    cluster, namespace = dependencies.cluster, job.namespace
    match action:
        case Create(manifest):
            await cluster.create(manifest)
        case DeletePod(name, uid, grace_seconds):
            await cluster.delete(ObjectRef("Pod", namespace, name, uid), grace_seconds=grace_seconds)
        case DeleteService(name, uid):
            await cluster.delete(ObjectRef("Service", namespace, name, uid))
        case DeleteConfigMap(name):
            await cluster.delete(ObjectRef("ConfigMap", namespace, name, ""))
        case DeleteJob(uid):
            await cluster.delete(ObjectRef(names.FINETUNEJOB_KIND, namespace, job.name, uid))
        case Emit():
            await cluster.emit_event(build_event(job, action, dependencies.now()))


def build_event(job: ObjectMeta, emit: Emit, now: datetime) -> RawBody:
    """Build an Event about the job. Its name is a hash of its key, so that the API server rejects a duplicate."""
    digest = hashlib.sha256(f"{job.uid}/{emit.key}".encode()).hexdigest()[:16]
    timestamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": emit.type,
        "reason": emit.reason,
        "message": emit.message[:1024],
        "source": {"component": names.MANAGER},
        "reportingComponent": names.MANAGER,
        "firstTimestamp": timestamp,
        "lastTimestamp": timestamp,
        "count": 1,
    }


async def _handle_invalid_spec(
    dependencies: PassDependencies, job: RawBody, error: ValidationError, cached: CachedState
) -> PassResult:
    """Fail a job whose spec cannot be parsed, and delete its pods."""
    try:
        status = JobStatus.model_validate(job.get("status") or {})
    except ValidationError as status_error:  # only another release of the operator can have written it
        problems = explain_validation_error(status_error, within="status")
        raise ClusterError(f"status cannot be read, the job is left alone: {problems}") from status_error
    metadata = ObjectMeta.model_validate(job["metadata"])
    if metadata.deletion_timestamp is not None:
        return PassResult(job)
    observation = Observation(nodes=observe_pods(_controlled_by(metadata.uid, cached.pods), ()))
    decision = decide_invalid(status, error, observation, dependencies.now(), generation=metadata.generation)
    if decision.status != status:
        job = await dependencies.cluster.write_status(job, render_status(decision.status))
    await _execute_actions(dependencies, metadata, decision.actions)
    return PassResult(job)
