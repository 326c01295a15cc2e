"""Deletes the children of deleted jobs that the garbage collector of Kubernetes did not delete (decisions/131)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime

from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache, JobKey
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.kube.cluster import Cluster, ClusterError, ObjectRef
from finetune_operator.observation.ownership import (
    RawBody,
    find_controlling_owner,
    get_controller_uid,
    get_group_kind_name,
)
from finetune_operator.observation.pods import NodeObservation, observe_pods

logger = logging.getLogger(__name__)

RELEASE_INTERVAL_SECONDS = 2.0
SWEEP_INTERVAL_SECONDS = 30.0
ORPHAN_GRACE_SECONDS = 60.0  # usually, the garbage collector deletes the children of a deleted job within seconds
MAX_CONFIG_MAPS = 100  # the operator may not list ConfigMaps, so it tries the names of the first attempts


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
    ) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._children = children
        self._now = now
        self._clock = clock
        self._first_seen: dict[JobKey, float] = {}

    async def run(self) -> None:
        """Sweep periodically, until cancelled. Only the leader should run it, because one sweep is enough."""
        await asyncio.gather(
            _repeat(self.sweep, SWEEP_INTERVAL_SECONDS), _repeat(self.release_quota, RELEASE_INTERVAL_SECONDS)
        )

    async def release_quota(self) -> None:
        """Delete the Workload of each deleted job whose pods have ended, but are kept by Kueue; log errors.

        Kueue removes its finalizer from deleted pods only if they are replaced or their Workload is deleted. Pods of
        lost Kubernetes nodes are removed, because Kueue would reserve quota for them again.
        """
        for key in self._children.list_keys():
            if key in self._jobs:
                continue
            pods = [pod for pod in self._children.pods(key) if get_controller_uid(pod) == key.uid]
            nodes, now = observe_pods(pods, ()), self._now()
            if not any(node.is_held_by_kueue for node in nodes) or not all(_has_stopped(node, now) for node in nodes):
                continue
            name = names.workload_name(find_controlling_owner(pods[0]).get("name", ""), key.uid)
            lost = [ObjectRef("Pod", key.namespace, node.pod_name, node.uid) for node in nodes if not node.has_ended]
            try:
                for pod in lost:
                    await self._cluster.delete(pod, grace_seconds=0)
                await self._cluster.delete(ObjectRef(names.WORKLOAD_KIND, key.namespace, name, "", owner_uid=key.uid))
            except ClusterError as error:
                logger.warning("quota of a deleted job not released, will be retried: %s", error)

    async def sweep(self) -> None:
        """Delete the children of each job that has been unknown for the grace period; log errors."""
        now = self._clock()
        unknown_keys = [key for key in self._children.list_keys() if key not in self._jobs]
        self._first_seen = {key: self._first_seen.get(key, now) for key in unknown_keys}
        for key, first_seen in self._first_seen.items():
            if now - first_seen < ORPHAN_GRACE_SECONDS:
                continue
            try:
                await self._delete_orphans(key)
            except ClusterError as error:
                logger.warning("children of a deleted job not deleted, will be retried: %s", error)
            except Exception:  # an unforeseen object must not end the process
                logger.exception("children of a deleted job not deleted", extra={"job_uid": key.uid})

    async def _delete_orphans(self, key: JobKey) -> None:
        """Delete the children of the job unless it exists. Raises: ClusterError"""
        children = [(kind, body) for kind, body in self._list_children(key) if get_controller_uid(body) == key.uid]
        if not children:
            return
        job_name = find_controlling_owner(children[0][1])["name"]
        job = await self._cluster.get(names.FINETUNEJOB_KIND, key.namespace, job_name)
        if job is not None and job["metadata"]["uid"] == key.uid:
            return  # the watch has not delivered the creation of the job yet
        orphans = [ref for kind, body in children if (ref := await self._read_orphan(kind, body, key)) is not None]
        if orphans:
            fields = {"objects": ", ".join(f"{ref.kind} {ref.name}" for ref in orphans), "namespace": key.namespace}
            logger.warning("deleting children that remained after job %s was deleted", job_name, extra=fields)
            for attempt in range(MAX_CONFIG_MAPS):
                config_map = names.config_map_name(job_name, key.uid, attempt)
                await self._cluster.delete(ObjectRef("ConfigMap", key.namespace, config_map, "", owner_uid=key.uid))
        for ref in orphans:
            await self._cluster.delete(ref)

    def _list_children(self, key: JobKey) -> Iterator[tuple[str, RawBody]]:
        yield from (("Pod", pod) for pod in self._children.pods(key))
        yield from (("Service", service) for service in self._children.services(key))

    async def _read_orphan(self, kind: str, body: RawBody, key: JobKey) -> ObjectRef | None:
        """Read the child again, and return its identity if it still belongs to the job and is not being deleted."""
        name = body["metadata"]["name"]
        current = await self._cluster.get(kind, key.namespace, name)
        if current is None or "deletionTimestamp" in current["metadata"]:
            return None
        owner = find_controlling_owner(current)
        is_job = get_group_kind_name(owner)[:2] == (names.FINETUNEJOB[0], names.FINETUNEJOB_KIND)
        is_child = is_job and owner.get("uid") == key.uid
        return ObjectRef(kind, key.namespace, name, current["metadata"]["uid"]) if is_child else None


async def _repeat(function: Callable[[], Awaitable[None]], interval_seconds: float) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        await function()


def _has_stopped(node: NodeObservation, now: datetime) -> bool:
    """Return whether a pod was deleted, and no process of it can run."""
    return node.is_terminating and (not node.is_scheduled or not node.may_run(now))
