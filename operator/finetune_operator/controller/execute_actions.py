"""Executes the actions of a decision as concurrent API requests and returns what they created."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_operator import names
from finetune_operator.controller.events import build_event
from finetune_operator.core.actions import (
    Action,
    Create,
    DeleteConfigMap,
    DeleteJob,
    DeletePod,
    DeletePodGroup,
    DeleteService,
    DeleteWorkload,
    EmitEvent,
)
from finetune_operator.failures.create_rejections import find_quota_capacity
from finetune_operator.kube.cluster import Cluster, ClusterError, CreateRejected, NameTaken, ObjectRef
from finetune_operator.observation.ownership import JobOwner
from finetune_operator.observation.pods import RejectedCreate

# The limits apply to each job, so that slow admission webhooks in one namespace delay other jobs little.
MAX_CONCURRENT_POD_CREATES = 16
_NEEDED_BY_PODS = frozenset({"ConfigMap", "Service", names.POD_GROUP_KIND})
POD_CREATE_SECONDS = 20.0  # no create of a pass starts later; the next pass continues


@dataclass(frozen=True)
class Creations:
    """Rejected creates, and the uids of the created pods by name."""

    rejected: tuple[RejectedCreate, ...] = ()
    pod_uids: Mapping[str, str] = field(default_factory=dict)


async def execute_actions(
    cluster: Cluster,
    job: ObjectMeta,
    actions: tuple[Action, ...],
    *,
    now: datetime,
    last_rejection: RejectedCreate | None = None,
) -> Creations:
    """Execute the actions and return what was created; pods are created after the Service and the ConfigMap.

    last_rejection: of the last try to create the pods; no pod is then created unless a dry run of one is accepted, and
    the quota of the rejection can ever have room for all.

    Raises:
        ClusterError: A request failed for a reason other than a rejected create; all other requests have ended.
    """
    pod_creates = [action for action in actions if isinstance(action, Create) and _creates_pod(action)]
    first_actions = [action for action in actions if _precedes_pods(action)]
    remaining_actions = [action for action in actions if not isinstance(action, Create) and action not in first_actions]
    # first create the objects that the pods need, and delete old PodGroups, which is not retried once the pods exist
    rejected_creates = await _execute_all_actions(cluster, job, first_actions, now)
    # do not create pods that would mount a foreign ConfigMap (decisions/111), or that are not scheduled as a group
    if any(rejected.kind in _NEEDED_BY_PODS for rejected in rejected_creates):
        pod_creates = []
    # then create the pods; deletions and events do not delay them
    pods, others = await asyncio.gather(
        _create_pods(cluster, pod_creates, last_rejection),
        _execute_all_actions(cluster, job, remaining_actions, now),
        return_exceptions=True,
    )
    if isinstance(pods, BaseException):
        raise pods
    if isinstance(others, BaseException):
        raise others
    return Creations(rejected_creates + pods.rejected + others, pods.pod_uids)


def select_executed_actions(actions: tuple[Action, ...], creations: Creations) -> tuple[Action, ...]:
    """Return the actions that were executed: no rejected create, and only the pods that were created."""
    rejected = {(rejected.kind, rejected.name) for rejected in creations.rejected}

    def was_executed(action: Action) -> bool:
        if not isinstance(action, Create):
            return True
        kind, name = action.manifest["kind"], action.manifest["metadata"]["name"]
        return name in creations.pod_uids if _creates_pod(action) else (kind, name) not in rejected

    return tuple(filter(was_executed, actions))


async def _create_pods(cluster: Cluster, creates: list[Create], last_rejection: RejectedCreate | None) -> Creations:
    """Create pods within the limits of one pass; after a rejection, no further one is sent.

    Raises:
        ClusterError: A create failed for another reason, or the time was too short for all of them.
    """
    if creates and last_rejection and (rejected := await _probe(cluster, creates, last_rejection)):
        return Creations((rejected,))
    slots, loop = asyncio.Semaphore(MAX_CONCURRENT_POD_CREATES), asyncio.get_running_loop()
    deadline = loop.time() + POD_CREATE_SECONDS
    pod_uids: dict[str, str] = {}
    has_failed = False

    async def create(action: Create) -> None:
        nonlocal has_failed
        async with slots:
            if has_failed or loop.time() >= deadline:
                return
            try:
                pod_uids[action.manifest["metadata"]["name"]] = await cluster.create(action.manifest)
            except (CreateRejected, NameTaken):
                has_failed = True
                raise

    results = await asyncio.gather(*(create(action) for action in creates), return_exceptions=True)
    rejected_creates = _collect_rejected_creates(results)
    delayed = len(creates) - len(pod_uids)
    if delayed and not rejected_creates:
        raise ClusterError(f"{delayed} of {len(creates)} pods are created later, because each create takes long")
    return Creations(rejected_creates, pod_uids)


async def _probe(cluster: Cluster, creates: list[Create], last_rejection: RejectedCreate) -> RejectedCreate | None:
    """Return why the pods cannot be created, without creating one: a part of a gang would only hold quota."""
    capacity = find_quota_capacity(last_rejection.message)
    if capacity is not None and capacity < len(creates):
        return last_rejection
    try:
        await cluster.dry_run_create(creates[0].manifest)
    except CreateRejected as error:
        return RejectedCreate(error.kind, error.name, error.status, error.message)
    return None


def _creates_pod(create: Create) -> bool:
    return bool(create.manifest["kind"] == "Pod")


def _precedes_pods(action: Action) -> bool:
    """Return whether no pod is created before the action has succeeded."""
    return isinstance(action, DeletePodGroup) or (isinstance(action, Create) and not _creates_pod(action))


async def _execute_all_actions(
    cluster: Cluster, job: ObjectMeta, actions: Sequence[Action], now: datetime
) -> tuple[RejectedCreate, ...]:
    """Execute all actions and return the rejected creates; raise other errors after all actions have ended."""
    results = await asyncio.gather(
        *(_execute_action(cluster, job, action, now) for action in actions), return_exceptions=True
    )
    return _collect_rejected_creates(results)


def _collect_rejected_creates(results: Iterable[BaseException | None]) -> tuple[RejectedCreate, ...]:
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


async def _execute_action(cluster: Cluster, job: ObjectMeta, action: Action, now: datetime) -> None:
    namespace, owner = job.namespace, JobOwner(job.name, job.uid)
    match action:
        case Create(manifest):
            await cluster.create(manifest)
        case DeletePod(name, uid, grace_seconds):
            await cluster.delete(ObjectRef("Pod", namespace, name, uid), grace_seconds=grace_seconds)
        case DeleteService(name, uid):
            await cluster.delete(ObjectRef("Service", namespace, name, uid))
        case DeleteConfigMap(name):
            await cluster.delete(ObjectRef("ConfigMap", namespace, name, "", owner=owner))
        case DeleteWorkload(name):
            await cluster.delete(ObjectRef(names.WORKLOAD_KIND, namespace, name, "", owner=owner))
        case DeletePodGroup(name, api_version):
            kind = f"{api_version}/{names.POD_GROUP_KIND}"
            await cluster.delete(ObjectRef(kind, namespace, name, "", owner=owner))
        case DeleteJob(uid):
            await cluster.delete(ObjectRef(names.FINETUNEJOB_KIND, namespace, job.name, uid))
        case EmitEvent():
            await cluster.emit_event(build_event(job, action, now))
