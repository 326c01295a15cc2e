"""Simulated Kueue with its integration of plain pod groups.

It follows the pod controller and webhook of Kueue 0.19 (pkg/controller/jobs/pod), which `make test-queue` runs.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError
from finetune_operator.observation.ownership import parse_time
from testing.simulator.world.apiserver import TERMINAL, Change, ObjectKey, RawBody, SimulatedApiServer
from testing.simulator.world.choices import Choices
from testing.simulator.world.cluster_queue import (
    DEACTIVATED,
    EVICTED,
    FINISHED,
    KUEUE,
    PRIORITIES,
    QUOTA_RESERVED,
    WAITING_FOR_REPLACEMENT,
    ClusterQueue,
    has_condition,
)
from testing.simulator.world.kubernetes_nodes import KubernetesNodes

QUEUE_LABEL, GROUP_LABEL, PRIORITY_LABEL = (
    f"{names.KUEUE_PREFIX}{name}" for name in ("queue-name", "pod-group-name", "priority-class")
)
TOTAL_COUNT, ROLE_HASH = f"{names.KUEUE_PREFIX}pod-group-total-count", f"{names.KUEUE_PREFIX}role-hash"
RESOURCE_IN_USE = f"{names.KUEUE_PREFIX}resource-in-use"  # finalizer of Workloads
GATE = {"name": f"{names.KUEUE_PREFIX}admission"}
DELAYS_SECONDS = (0.03, 0.15, 1.0)
POLL_SECONDS = 5.0

Pods = list[tuple[ObjectKey, RawBody]]


class SimulatedKueue:
    """Webhook and controllers of Kueue; while `is_running` is False, pods with a queue cannot be created."""

    def __init__(self, server: SimulatedApiServer, k8s_nodes: KubernetesNodes, choices: Choices, *, quota: int) -> None:
        self.queue = ClusterQueue(server, quota=quota)
        self.is_running = True
        self._num_competitors = 0
        self._server = server
        self._k8s_nodes = k8s_nodes
        self._choices = choices
        self._has_changed = asyncio.Event()
        self._unobserved: set[str] = set()  # uids of excess pods of which Kueue waits for an event
        server.mutate_pod = self._mutate_pod
        server.listeners.append(self._on_change)
        k8s_nodes.spawn(self._run())

    def set_active(self, key: ObjectKey, *, active: bool) -> None:
        """Set spec.active of a Workload as an administrator does."""
        if workload := self._server.get(key):
            self._server.replace_fields(key, actor="user", spec={**workload["spec"], "active": active})
            if not active:
                self.queue.evict(key, DEACTIVATED, "The workload is deactivated")

    def submit_competitor(self, *, pods: int, priority: int) -> ObjectKey:
        """Create a Workload of another kind of job, which only holds quota, and return its key."""
        self._num_competitors += 1
        key = ObjectKey(names.WORKLOAD_KIND, "other-tenant", f"other-{self._num_competitors}")
        self._create_workload(key, Counter(main=pods), priority=priority, finalizers=[])
        return key

    def _mutate_pod(self, pod: RawBody) -> RawBody:
        """Gate a pod with a queue, as the mutating webhook does."""
        metadata = pod["metadata"]
        if QUEUE_LABEL not in metadata.get("labels", {}):
            return pod
        if not self.is_running:
            message = 'Internal error occurred: failed calling webhook "mpod.kb.io": connection refused'
            raise ApiError(message, status=500, reason="InternalError")
        metadata = {
            **metadata,
            "labels": {**metadata["labels"], names.KUEUE_MANAGED: "true"},
            "annotations": {**metadata.get("annotations", {}), ROLE_HASH: compute_role_hash(pod)},
            "finalizers": [names.KUEUE_FINALIZER],
        }
        return {**pod, "metadata": metadata, "spec": {**pod["spec"], "schedulingGates": [GATE]}}

    def _on_change(self, change: Change) -> None:
        is_managed = change.kind == "Pod" and names.KUEUE_MANAGED in change.body["metadata"].get("labels", {})
        if is_managed:
            self._unobserved.discard(change.body["metadata"]["uid"])
        if is_managed or change.kind == names.WORKLOAD_KIND:
            self._has_changed.set()

    async def _run(self) -> None:
        """Reconcile all groups after each change, and periodically, because grace periods end without an event."""
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS if self._list_groups() else None):
                    await self._has_changed.wait()
                await asyncio.sleep(self._choices.pick(DELAYS_SECONDS))
            except TimeoutError:
                pass
            self._has_changed.clear()
            if self.is_running:
                for group in self._list_groups():
                    self._reconcile_group(group)
                self.queue.schedule()

    def _list_groups(self) -> list[ObjectKey]:
        """Return the keys of the Workloads of all groups, including those that do not exist yet."""
        groups = {key for key, workload in self.queue.list_workloads() if workload["metadata"]["finalizers"]}
        for key, pod in self._server.list_objects("Pod"):
            labels = pod["metadata"].get("labels", {})
            if names.KUEUE_MANAGED in labels:
                groups.add(ObjectKey(names.WORKLOAD_KIND, key.namespace, labels[GROUP_LABEL]))
        return sorted(groups)

    def _list_pods(self, group: ObjectKey) -> Pods:
        return [
            (key, pod)
            for key, pod in self._server.list_objects("Pod")
            if key.namespace == group.namespace
            and names.KUEUE_MANAGED in pod["metadata"].get("labels", {})
            and pod["metadata"]["labels"][GROUP_LABEL] == group.name
        ]

    def _reconcile_group(self, group: ObjectKey) -> None:
        pods, workload = self._list_pods(group), self._server.get(group)
        if workload is None:
            self._compose_workload(group, pods)
        elif has_condition(workload, FINISHED):
            self._remove_finalizers(pods)
            if not pods or "deletionTimestamp" in workload["metadata"]:
                self._delete_workload(group)
        elif "deletionTimestamp" in workload["metadata"]:
            self._stop_pods(pods, "WorkloadDeleted", "Workload is deleted")
            self._remove_finalizers(pods)
            self._server.remove_finalizer(group, RESOURCE_IN_USE, actor=KUEUE)
        elif not pods:  # the garbage collector deletes a Workload whose owners are gone
            self._delete_workload(group)
        else:
            self._reconcile_workload(group, workload, pods)

    def _compose_workload(self, group: ObjectKey, pods: Pods) -> None:
        """Create the Workload of a group once all its pods exist."""
        total = int(pods[0][1]["metadata"]["annotations"][TOTAL_COUNT])
        if _has_succeeded(pods, total):
            self._remove_finalizers(pods)
            return
        if not any(_is_suspended(pod) for _, pod in pods):
            self._stop_pods(pods, "NoMatchingWorkload", "Missing Workload; unable to restore pod templates")
        if any(self._is_active(pod) for _, pod in pods):
            return
        self._remove_finalizers(item for item in pods if not _is_runnable(item[1]))
        runnable = sorted((item for item in pods if _is_runnable(item[1])), key=_rank_runnable)
        if len(runnable) < total:
            return
        self._remove_excess_pods(runnable[total:])
        labels = runnable[0][1]["metadata"]["labels"]
        roles = Counter(_get_role(pod) for _, pod in runnable[:total])
        priority = PRIORITIES[labels.get(PRIORITY_LABEL, "")]
        self._create_workload(group, roles, priority=priority, finalizers=[RESOURCE_IN_USE])
        self._add_owners(group, runnable[:total])

    def _create_workload(self, key: ObjectKey, roles: Counter[str], *, priority: int, finalizers: list[str]) -> None:
        pod_sets = [{"name": role, "count": count} for role, count in sorted(roles.items())]
        metadata = {"name": key.name, "namespace": key.namespace, "finalizers": finalizers}
        spec = {"queueName": "gpus", "priority": priority, "active": True, "podSets": pod_sets}
        self._server.create({"kind": key.kind, "metadata": metadata, "spec": spec, "status": {}}, actor=KUEUE)

    def _add_owners(self, group: ObjectKey, pods: Pods) -> None:
        """Make the pods owners of the Workload, of which none is the controller."""
        if (workload := self._server.get(group)) is None:
            return
        owners = {owner["uid"]: owner for owner in workload["metadata"].get("ownerReferences", ())}
        for key, pod in pods:
            uid = pod["metadata"]["uid"]
            owners[uid] = {"apiVersion": "v1", "kind": "Pod", "name": key.name, "uid": uid}
        metadata = {**workload["metadata"], "ownerReferences": list(owners.values())}
        self._server.replace_fields(group, actor=KUEUE, metadata=metadata)

    def _reconcile_workload(self, group: ObjectKey, workload: RawBody, pods: Pods) -> None:
        """Replace failed pods of the group by new ones, then apply the admission or eviction of its Workload."""
        kept, excess, replaced, num_absent = _match_pods(workload, pods)
        if not kept:
            self._delete_workload(group)
            return
        self._add_owners(group, kept)
        if self._unobserved & {pod["metadata"]["uid"] for _, pod in pods}:
            return
        self._remove_excess_pods(excess)
        self._remove_finalizers(replaced)
        self.queue.set_condition(group, WAITING_FOR_REPLACEMENT, value=num_absent > 0, reason="PodsFailed")
        num_pods = sum(pod_set["count"] for pod_set in workload["spec"]["podSets"])
        if _has_succeeded(kept, num_pods):
            self.queue.set_condition(group, FINISHED, value=True, reason="Succeeded")
            self.queue.release_quota(group, "finished")
            self._remove_finalizers(pods)
            return
        num_succeeded = sum(pod["status"]["phase"] == "Succeeded" for _, pod in kept)
        status = (self._server.get(group) or workload)["status"]
        self._server.replace_fields(group, actor=KUEUE, status={**status, "reclaimablePods": num_succeeded})
        self._apply_admission(group, kept)

    def _apply_admission(self, group: ObjectKey, pods: Pods) -> None:
        workload = self._server.get(group) or {}
        if has_condition(workload, EVICTED):
            condition = next(c for c in workload["status"]["conditions"] if c["type"] == EVICTED)
            running = [item for item in pods if not _is_suspended(item[1])]
            self._stop_pods(running, f"WorkloadEvictedDueTo{condition['reason']}", condition["message"])
            is_stopped = not any(self._is_active(pod) for _, pod in self._reload(pods))
            if is_stopped and has_condition(workload, QUOTA_RESERVED):
                self.queue.release_quota(group, condition["message"])
        elif has_condition(workload, QUOTA_RESERVED):
            for key, pod in pods:
                if _is_gated(pod) and "deletionTimestamp" not in pod["metadata"]:
                    spec = {field: value for field, value in pod["spec"].items() if field != "schedulingGates"}
                    status = {**pod["status"], "conditions": []}
                    self._server.replace_fields(key, actor=KUEUE, spec=spec, status=status)
        elif not any(_is_suspended(pod) for _, pod in pods):
            self._stop_pods(pods, "NotAdmitted", "Not admitted by cluster queue")

    def _stop_pods(self, pods: Pods, reason: str, message: str) -> None:
        """Mark and delete pods that are not being deleted."""
        condition = {"type": "TerminationTarget", "status": "True", "reason": reason, "message": message}
        for key, pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                self._k8s_nodes.set_condition(key, condition, actor=KUEUE)
                self._server.delete(key, {}, actor=KUEUE)

    def _remove_excess_pods(self, pods: Pods) -> None:
        for key, pod in pods:
            metadata = pod["metadata"]
            if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
                self._unobserved.add(metadata["uid"])  # nothing changes, so that Kueue receives no event
            self._server.remove_finalizer(key, names.KUEUE_FINALIZER, actor=KUEUE)
            if "deletionTimestamp" not in metadata:
                self._server.delete(key, {}, actor=KUEUE)

    def _remove_finalizers(self, pods: Iterable[tuple[ObjectKey, RawBody]]) -> None:
        for key, _ in pods:
            self._server.remove_finalizer(key, names.KUEUE_FINALIZER, actor=KUEUE)

    def _delete_workload(self, key: ObjectKey) -> None:
        self._server.delete(key, {}, actor=KUEUE)
        self._server.remove_finalizer(key, RESOURCE_IN_USE, actor=KUEUE)

    def _reload(self, pods: Pods) -> Pods:
        return [(key, pod) for key, _ in pods if (pod := self._server.get(key))]

    def _is_active(self, pod: RawBody) -> bool:
        """Return whether the pod runs, and is not overdue, as a deleted pod of a lost Kubernetes node is."""
        metadata = pod["metadata"]
        deadline = parse_time(metadata.get("deletionTimestamp"))
        overdue_at = deadline and deadline + timedelta(seconds=metadata.get("deletionGracePeriodSeconds", 0))
        return pod["status"].get("phase") == "Running" and (overdue_at is None or self._server.now() <= overdue_at)


def compute_role_hash(pod: RawBody) -> str:
    """Return the hash of the fields by which Kueue decides whether a pod can replace another one."""
    spec = pod["spec"]
    shape: dict[str, Any] = {
        "containers": [(c.get("resources"), c.get("ports")) for c in spec.get("containers", ())],
        **{
            field: spec.get(field)
            for field in (
                "nodeSelector",
                "affinity",
                "tolerations",
                "runtimeClassName",
                "priority",
                "topologySpreadConstraints",
                "resourceClaims",
            )
        },
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]


def _match_pods(workload: RawBody, pods: Pods) -> tuple[Pods, Pods, Pods, int]:
    """Return the pods that the group keeps, those in excess, the replaced ones, and the number of absent pods."""
    kept: Pods = []
    excess: Pods = []
    replaced: Pods = []
    num_absent = 0
    for pod_set in workload["spec"]["podSets"]:
        count, members = pod_set["count"], [item for item in pods if _get_role(item[1]) == pod_set["name"]]
        runnable = sorted((item for item in members if _is_runnable(item[1])), key=_rank_runnable)
        ended = sorted((item for item in members if not _is_runnable(item[1])), key=_rank_ended)
        num_kept = len(ended) - max(0, min(len(ended), len(ended) + len(runnable) - count))
        num_absent += max(0, count - len(runnable))
        kept += [*runnable[:count], *ended[:num_kept]]
        excess += runnable[count:]
        replaced += ended[num_kept:]
    return kept, excess, replaced, num_absent


def _has_succeeded(pods: Pods, total: int) -> bool:
    """Return whether all pods of the group have succeeded."""
    return [pod["status"]["phase"] for _, pod in pods].count("Succeeded") == total


def _is_gated(pod: RawBody) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


def _is_suspended(pod: RawBody) -> bool:
    return _is_gated(pod) or pod["status"].get("phase") in TERMINAL


def _is_runnable(pod: RawBody) -> bool:
    """Return whether the pod may run, runs or has succeeded, so that no other pod replaces it."""
    is_lost = "deletionTimestamp" in pod["metadata"] and not pod["spec"].get("nodeName")
    return not is_lost and bool(pod["status"].get("phase") != "Failed")


def _get_role(pod: RawBody) -> str:
    return str(pod["metadata"]["annotations"][ROLE_HASH])


def _has_finalizer(pod: RawBody) -> bool:
    return names.KUEUE_FINALIZER in pod["metadata"].get("finalizers", ())


def _rank_runnable(item: tuple[ObjectKey, RawBody]) -> tuple[bool, bool, str]:
    """Return the sort key of a pod that may run; the last pods are in excess."""
    _, pod = item
    return not _has_finalizer(pod), _is_gated(pod), pod["metadata"]["creationTimestamp"]


def _rank_ended(item: tuple[ObjectKey, RawBody]) -> tuple[bool, str]:
    """Return the sort key of an ended pod; the last pods are replaced."""
    _, pod = item
    return not _has_finalizer(pod), pod["metadata"]["creationTimestamp"]
