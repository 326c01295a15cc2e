"""Deletes the children of deleted jobs that the garbage collector of Kubernetes did not delete (decisions/131)."""

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from datetime import datetime
from itertools import islice, zip_longest

from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache, JobKey
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.kube.cluster import Cluster, ClusterError, ObjectRef
from finetune_operator.observation.ownership import JobOwner, RawBody, find_owning_job, is_controlled, select_children
from finetune_operator.observation.pods import NodeObservation, observe_pods
from finetune_operator.tasks.error_net import ErrorNet

logger = logging.getLogger(__name__)

RELEASE_INTERVAL_SECONDS = 2.0
SWEEP_INTERVAL_SECONDS = 30.0
ORPHAN_GRACE_SECONDS = 60.0  # usually, the garbage collector deletes the children of a deleted job within seconds
# Whoever may create pods can make any number of children of jobs that do not exist, so that each round is bounded.
MAX_JOBS_PER_ROUND = 20
MAX_OWNERS_PER_JOB = 4
MAX_ORPHANS_PER_JOB = 50  # the next round deletes the others
REPEAT_SECONDS = 60.0  # before the quota of the same job is released again
PODS_PER_TURN = 50  # pods that are parsed before the event loop continues with other tasks


class OrphanSweeper:
    """Finds children of unknown jobs in the cache, and deletes them after a grace period if their job is gone."""

    def __init__(
        self,
        cluster: Cluster,
        jobs: JobCache,
        children: ChildCache,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
        net: ErrorNet | None = None,
    ) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._children = children
        self._now = now
        self._clock = clock
        self._net = net or ErrorNet()
        self._first_seen: dict[JobKey, float] = {}
        self._released_at: dict[JobKey, float] = {}

    async def run(self) -> None:
        """Sweep periodically, until cancelled. Only the leader should run it, because one sweep is enough."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._net.repeat("sweep", self.sweep, lambda: SWEEP_INTERVAL_SECONDS))
            group.create_task(
                self._net.repeat("release of quota", self.release_quota, lambda: RELEASE_INTERVAL_SECONDS)
            )

    async def release_quota(self) -> None:
        """Delete the Workload of each deleted job whose pods have ended, but are kept by Kueue; log errors.

        Kueue removes its finalizer from deleted pods only if they are replaced or their Workload is deleted. Pods of
        lost Kubernetes nodes are removed, because Kueue would reserve quota for them again.
        """
        oldest = self._clock() - REPEAT_SECONDS
        self._released_at = {key: released_at for key, released_at in self._released_at.items() if released_at > oldest}
        held = [
            key
            for key in self._list_unknown_jobs()
            if key not in self._released_at and any(_is_held(pod) for pod in self._children.pods(key))
        ]
        for key in _choose_fairly(held):
            for owner in self._find_owners(key):
                await self._try(self._release_quota_of(key, owner), "quota of a deleted job not released", key)

    async def sweep(self) -> None:
        """Delete the children of each job that has been unknown for the grace period; log errors."""
        now = self._clock()
        self._first_seen = {key: self._first_seen.get(key, now) for key in self._list_unknown_jobs()}
        due = [key for key, first_seen in self._first_seen.items() if now - first_seen >= ORPHAN_GRACE_SECONDS]
        for key in _choose_fairly(due):
            for owner in self._find_owners(key):
                await self._try(self._delete_orphans(key, owner), "children of a deleted job not deleted", key)

    async def _try(self, work: Coroutine[None, None, None], problem: str, key: JobKey) -> None:
        try:
            await work
        except ClusterError as error:
            logger.warning("%s, will be retried: %s", problem, error)
        except Exception as error:  # an unforeseen object costs only its own job this round
            self._net.record(problem, error, about=f"{key.namespace}/{key.uid}")

    async def _release_quota_of(self, key: JobKey, owner: JobOwner) -> None:
        """Delete the Workload of a deleted job once none of its pods can run. Raises: ClusterError"""
        nodes, now = await _observe_in_turns(select_children(owner, self._children.pods(key))), self._now()
        if not any(node.is_held_by_kueue for node in nodes) or not all(_has_stopped(node, now) for node in nodes):
            return
        for node in nodes:
            if not node.has_ended:
                pod = ObjectRef("Pod", key.namespace, node.pod_name, node.uid)
                await self._cluster.delete(pod, grace_seconds=0)
        name, pod_uids = names.workload_name(owner.name, owner.uid), frozenset(node.uid for node in nodes)
        workload = ObjectRef(names.WORKLOAD_KIND, key.namespace, name, "", owner=owner, pod_uids=pod_uids)
        await self._cluster.delete(workload)
        self._released_at[key] = self._clock()

    async def _delete_orphans(self, key: JobKey, owner: JobOwner) -> None:
        """Delete the children of the job unless it exists. Raises: ClusterError"""
        job = await self._cluster.get(names.FINETUNEJOB_KIND, key.namespace, owner.name)
        if job is not None and job["metadata"]["uid"] == key.uid:
            return  # the watch has not delivered the creation of the job yet
        children = [(kind, body) for kind, body in self._list_children(key) if is_controlled(body, owner)]
        chosen = children[:MAX_ORPHANS_PER_JOB]
        orphans = [ref for kind, body in chosen if (ref := await self._read_orphan(kind, body, key, owner))]
        if not orphans:
            return
        fields = {"objects": ", ".join(f"{ref.kind} {ref.name}" for ref in orphans), "namespace": key.namespace}
        logger.warning("deleting children that remained after job %s was deleted", owner.name, extra=fields)
        for attempt in _guess_attempts(owner, [ref.name for ref in orphans]):
            config_map = names.config_map_name(owner.name, key.uid, attempt)
            await self._cluster.delete(ObjectRef("ConfigMap", key.namespace, config_map, "", owner=owner))
        for ref in orphans:
            await self._cluster.delete(ref)

    def _list_unknown_jobs(self) -> list[JobKey]:
        return [key for key in self._children.list_keys() if key not in self._jobs]

    def _list_children(self, key: JobKey) -> Iterator[tuple[str, RawBody]]:
        yield from (("Pod", pod) for pod in self._children.pods(key))
        yield from (("Service", service) for service in self._children.services(key))

    def _find_owners(self, key: JobKey) -> Collection[JobOwner]:
        """Return the jobs that the children of the key belong to: one, and others if somebody forged children."""
        owners = (find_owning_job(body) for _, body in self._list_children(key))
        distinct = {owner for owner in owners if owner is not None and owner.uid == key.uid}
        return random.sample(sorted(distinct), min(len(distinct), MAX_OWNERS_PER_JOB))

    async def _read_orphan(self, kind: str, body: RawBody, key: JobKey, owner: JobOwner) -> ObjectRef | None:
        """Read the child again, and return its identity if it still belongs to the job and is not being deleted."""
        name = body["metadata"]["name"]
        current = await self._cluster.get(kind, key.namespace, name)
        if current is None or "deletionTimestamp" in current["metadata"]:
            return None
        uid = current["metadata"]["uid"]
        return ObjectRef(kind, key.namespace, name, uid) if is_controlled(current, owner) else None


def _choose_fairly(keys: Iterable[JobKey]) -> list[JobKey]:
    """Return the jobs of one round, in random order, from all namespaces in turn."""
    by_namespace: defaultdict[str, list[JobKey]] = defaultdict(list)
    for key in keys:
        by_namespace[key.namespace].append(key)
    for keys_of_namespace in by_namespace.values():
        random.shuffle(keys_of_namespace)
    turns = zip_longest(*by_namespace.values())
    return list(islice((key for turn in turns for key in turn if key is not None), MAX_JOBS_PER_ROUND))


async def _observe_in_turns(pods: list[RawBody]) -> list[NodeObservation]:
    nodes: list[NodeObservation] = []
    for start in range(0, len(pods), PODS_PER_TURN):
        nodes += observe_pods(pods[start : start + PODS_PER_TURN], ())
        await asyncio.sleep(0)
    return nodes


def _guess_attempts(owner: JobOwner, object_names: Iterable[str]) -> range:
    """Return the attempts whose ConfigMap may exist, from the names of pods."""
    pods = filter(None, (names.parse_pod_name(name, owner.name) for name in object_names))
    newest = max((attempt for attempt, _ in pods), default=0)
    return range(max(0, newest - 1), newest + 2)


def _is_held(pod: RawBody) -> bool:
    return names.KUEUE_FINALIZER in (pod["metadata"].get("finalizers") or ())


def _has_stopped(node: NodeObservation, now: datetime) -> bool:
    """Return whether a pod was deleted, and no process of it can run."""
    return node.is_terminating and (not node.is_scheduled or not node.may_run(now))
