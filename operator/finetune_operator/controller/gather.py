"""Builds the Observation of a job from the caches and, if a decision needs confirmation, from uncached reads."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.name_types import is_object_name
from finetune_api.v1alpha1.status import AttemptState, Progress
from finetune_operator import names
from finetune_operator.controller.identity_cache import IdentityCache
from finetune_operator.controller.progress_poller import PolledDegradations
from finetune_operator.failures.create_rejections import collect_claim_names
from finetune_operator.failures.summarise_evidence import count_nodes
from finetune_operator.kube.cluster import Cluster
from finetune_operator.observation.ownership import (
    JobOwner,
    RawBody,
    find_controlling_owner,
    find_owning_job,
    select_children,
)
from finetune_operator.observation.pod_identity import select_own_nodes
from finetune_operator.observation.pods import (
    Claim,
    NodeObservation,
    Observation,
    RejectedCreate,
    observe_pod,
    observe_pods,
)
from finetune_operator.plan.manifests import is_intact_headless_service
from finetune_supervisor.messages import Degradation

# Most passes of a job find most of its pods unchanged. About 4 KiB per entry, most of which the caches hold anyway.
MAX_PARSED_PODS = 4096
MAX_CONCURRENT_READS = 8  # of objects, for one pass
_parse_live_pod = IdentityCache(partial(observe_pod, is_tombstone=False), max_entries=MAX_PARSED_PODS)
_parse_tombstone = IdentityCache(partial(observe_pod, is_tombstone=True), max_entries=MAX_PARSED_PODS)


@dataclass(frozen=True)
class CachedState:
    """Cached state of one job; `deleted_pods` contains the last known objects of deleted pods."""

    pods: tuple[RawBody, ...] = ()
    deleted_pods: tuple[RawBody, ...] = ()
    services: tuple[RawBody, ...] = ()
    progress: Progress | None = None
    degradations: PolledDegradations | None = None
    unreachable_endpoint: str = ""  # `host:port` that does not respond to progress polls
    rejected_creates: tuple[RejectedCreate, ...] = ()  # rejected creates of the last pass that tried to create
    last_rejection: RejectedCreate | None = None  # None if the last create was accepted
    create_delay: timedelta = timedelta()  # until the next try; zero if the last one was not rejected
    missing_rights: tuple[str, ...] = ()  # that the API server refuses to the operator in the job's namespace
    time_since_status_write: timedelta | None = None  # None before the first status write of this process
    # requests of this process whose events have not necessarily arrived
    expected_pods: frozenset[str] = frozenset()
    expected_services: frozenset[str] = frozenset()
    created_pods: Mapping[str, str] = field(default_factory=dict)  # uid by name: what this process created of them
    sent_deletions: Mapping[str, int] = field(default_factory=dict)  # grace period in seconds by uid of the pod


def observe_cached(job: FineTuneJob, cached: CachedState) -> Observation:
    """Build the observation from the caches, ignoring progress of an earlier attempt."""
    record = job.status.attempts[-1] if job.status.attempts else None
    progress = cached.progress
    if progress and record and record.start_time and progress.update_time and progress.update_time < record.start_time:
        progress = None  # the polled progress belongs to an earlier attempt
    uid, owner = job.metadata.uid, get_identity(job)
    services = select_children(owner, cached.services)
    edited_uids = (service["metadata"]["uid"] for service in services if not is_intact_headless_service(service, uid))
    return Observation(
        nodes=observe_cached_pods(job, cached),
        service_exists=any(is_intact_headless_service(service, uid) for service in services)
        or (not services and names.service_name(job.metadata.name) in cached.expected_services),
        edited_service_uid=next(edited_uids, ""),
        progress=progress,
        degraded=_select_degradations(job, cached),
        unreachable_endpoint=cached.unreachable_endpoint,
        rejected_creates=cached.rejected_creates,
        create_delay=cached.create_delay,
        expected_pods=cached.expected_pods,
        sent_deletions=cached.sent_deletions,
        missing_rights=cached.missing_rights,
    )


def _select_degradations(job: FineTuneJob, cached: CachedState) -> tuple[Degradation, ...] | None:
    """Return the polled degradations of the current attempt; None if it was not polled."""
    report = cached.degradations
    return report.degraded if report is not None and report.attempt == job.status.attempt else None


def observe_cached_pods(job: FineTuneJob, cached: CachedState) -> tuple[NodeObservation, ...]:
    """Parse the pods of the job, from the cache and its tombstones."""
    owner = get_identity(job)
    pods, deleted_pods = select_children(owner, cached.pods), select_children(owner, cached.deleted_pods)
    return select_own_nodes(job, observe_pods(pods, deleted_pods, parse_pod=_parse_cached_pod))


def _parse_cached_pod(pod: RawBody, *, is_tombstone: bool) -> NodeObservation | None:
    return _parse_tombstone(pod) if is_tombstone else _parse_live_pod(pod)


async def observe_uncached(
    cluster: Cluster, job: FineTuneJob, observation: Observation, cached: CachedState
) -> Observation:
    """Update the observation with listed pods and, until an attempt was created, the access modes of the claims."""
    namespace, uid, owner = job.metadata.namespace, job.metadata.uid, get_identity(job)
    # a job that began with another release may have an invalid name; its pods wait, because no such claim exists
    mounted_claims = filter(is_object_name, collect_claim_names(job)) if is_first_start(job) else ()
    claims_request = _get_objects_by_name(cluster, "PersistentVolumeClaim", namespace, mounted_claims)
    # Until an attempt has all its pods, list by name, to find pods that a deleted job of the same name left
    # (decisions/205). An attempt without them may have been stopped while it waited for their end.
    label, value = (names.JOB_NAME, job.metadata.name) if is_first_start(job) else (names.JOB_UID, uid)
    listed_pods, claims = await asyncio.gather(cluster.list_pods(namespace, label, value), claims_request)
    # A cached pod that the LIST does not contain was deleted; the cached object is its last known state.
    deleted_pods = select_children(owner, (*cached.deleted_pods, *cached.pods))

    def observe_own_pods(pods: Iterable[RawBody]) -> tuple[NodeObservation, ...]:
        return select_own_nodes(job, observe_pods(select_children(owner, pods), deleted_pods))

    listed_observation = replace(observation, nodes=observe_own_pods(listed_pods))
    unlisted_pods = await _get_objects_by_name(
        cluster, "Pod", namespace, _find_unlisted_pod_names(job, listed_observation)
    )
    return replace(
        observation,
        nodes=observe_own_pods((*listed_pods, *unlisted_pods)),
        claims=tuple(
            Claim(claim["metadata"]["name"], tuple(claim.get("spec", {}).get("accessModes") or ())) for claim in claims
        ),
        predecessor_nodes=_observe_predecessor_pods(job, listed_pods),
        is_fresh=True,
    )


def get_identity(job: FineTuneJob) -> JobOwner:
    """Return what the owner references of the job's children name."""
    return JobOwner(job.metadata.name, job.metadata.uid)


def is_first_start(job: FineTuneJob) -> bool:
    """Return whether the attempt is starting and no attempt of the job has had all its pods.

    Later, a claim is as it was at the first start, or a user changed the cluster, and no pod of a deleted job is left.
    """
    attempts = job.status.attempts
    return attempts[-1].state is AttemptState.STARTING and not any(record.created for record in attempts)


def _observe_predecessor_pods(job: FineTuneJob, listed_pods: Iterable[RawBody]) -> tuple[NodeObservation, ...]:
    """Parse the pods of deleted jobs of the same name; the garbage collector deletes them, or their owner references.

    It deletes only the owner references if the job was deleted with `--cascade=orphan`.
    """

    def belongs_to_predecessor(pod: RawBody) -> bool:
        owner = find_owning_job(pod)
        return owner is not None and owner.name == job.metadata.name and owner.uid != job.metadata.uid

    owned_pods = [
        pod if find_controlling_owner(pod) else _restore_owner_reference(pod, job.metadata.name) for pod in listed_pods
    ]
    return observe_pods(filter(belongs_to_predecessor, owned_pods), ())


def _restore_owner_reference(pod: RawBody, job_name: str) -> RawBody:
    """Return a pod without owner with a reference to the job that its labels name."""
    uid = (pod["metadata"].get("labels") or {}).get(names.JOB_UID)
    owner = {"apiVersion": names.API_VERSION, "kind": names.FINETUNEJOB_KIND, "name": job_name, "uid": uid}
    return {**pod, "metadata": {**pod["metadata"], "ownerReferences": [{**owner, "controller": True}]}}


async def _get_objects_by_name(
    cluster: Cluster, kind: str, namespace: str, object_names: Iterable[str]
) -> list[RawBody]:
    slots = asyncio.Semaphore(MAX_CONCURRENT_READS)

    async def get(name: str) -> RawBody | None:
        async with slots:
            return await cluster.get(kind, namespace, name)

    bodies = await asyncio.gather(*map(get, object_names))
    return [body for body in bodies if body is not None]


def _find_unlisted_pod_names(job: FineTuneJob, listed_observation: Observation) -> list[str]:
    """Return the names of unlisted pods of the current attempt whose end or deletion was not observed.

    A user may have removed the labels of such a pod, so that only a GET by name finds it (decisions/107).
    """
    record = job.status.attempts[-1]
    if not record.created and record.state is not AttemptState.STOPPING:
        return []
    observed_nodes = listed_observation.nodes_of_attempt(record.attempt)
    observed_ranks = {node.node_rank for node in observed_nodes if not node.has_disappeared}
    ranks = range(count_nodes(record) or job.num_attempt_nodes)
    return [names.pod_name(job.metadata.name, record.attempt, rank) for rank in ranks if rank not in observed_ranks]
