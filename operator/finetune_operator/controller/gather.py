"""Gathering: what the caches contain about a job becomes an Observation, confirmed by uncached reads if needed."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, Progress
from finetune_operator import names
from finetune_operator.failures.create_rejections import claim_names
from finetune_operator.kube.cluster import Cluster
from finetune_operator.observation.ownership import RawBody, controller_uid
from finetune_operator.observation.pods import Claim, NodeObservation, Observation, RejectedCreate, observe_pods
from finetune_operator.plan.manifests import is_intact_headless_service


@dataclass(frozen=True)
class CachedState:
    """What the caches contain about one job; `deleted_pods` are last known objects."""

    pods: tuple[RawBody, ...] = ()
    deleted_pods: tuple[RawBody, ...] = ()
    services: tuple[RawBody, ...] = ()
    progress: Progress | None = None
    unreachable_endpoint: str = ""  # host:port that no longer answers progress polls
    rejected_creates: tuple[RejectedCreate, ...] = ()  # of the last pass
    since_status_write: timedelta | None = None  # None if this process has not written the status yet


def observe_cached(job: FineTuneJob, cached: CachedState) -> Observation:
    """Return the observation that the caches give, without progress of an earlier attempt."""
    record = job.status.attempts[-1] if job.status.attempts else None
    progress = cached.progress
    if progress and record and record.start_time and progress.update_time and progress.update_time < record.start_time:
        progress = None  # of an earlier attempt
    uid = job.metadata.uid
    services = _controlled_by(uid, cached.services)
    edited = (service["metadata"]["uid"] for service in services if not is_intact_headless_service(service, uid))
    return Observation(
        nodes=observe_cached_pods(uid, cached),
        service_exists=any(is_intact_headless_service(service, uid) for service in services),
        edited_service_uid=next(edited, ""),
        progress=progress,
        unreachable_endpoint=cached.unreachable_endpoint,
        rejected_creates=cached.rejected_creates,
    )


def observe_cached_pods(job_uid: str, cached: CachedState) -> tuple[NodeObservation, ...]:
    """Return the pods that the job controls, from the cache and its tombstones."""
    return observe_pods(_controlled_by(job_uid, cached.pods), _controlled_by(job_uid, cached.deleted_pods))


async def observe_uncached(
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

    Somebody may have removed their labels, so that no selector matches them; a GET by name finds them (decisions/107).
    """
    record = job.status.attempts[-1]
    if not record.created and record.state is not AttemptState.STOPPING:
        return []
    observed_ranks = {node.node_rank for node in listed.nodes_of_attempt(record.attempt) if not node.disappeared}
    ranks = range(len(record.evidence) or job.spec.num_nodes)
    return [names.pod_name(job.metadata.name, record.attempt, rank) for rank in ranks if rank not in observed_ranks]


def _controlled_by(uid: str, bodies: Iterable[RawBody]) -> list[RawBody]:
    return [body for body in bodies if controller_uid(body) == uid]
