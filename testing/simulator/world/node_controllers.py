"""Simulated Kubernetes controllers for node lifecycle, taint eviction, pod GC and garbage collection."""

import asyncio
from collections.abc import Callable

from finetune_operator import names
from testing.simulator.world.apiserver import FOREGROUND, TERMINAL, Change, ObjectKey, RawBody, SimulatedApiServer
from testing.simulator.world.choices import Choices
from testing.simulator.world.kubernetes_nodes import POLL_SECONDS, KubernetesNode, KubernetesNodes

UNSCHEDULABLE_SECONDS = 50.0  # delay from the last kubelet heartbeat to the NoSchedule taint
UNREACHABLE_SECONDS = 60.0  # delay from the last kubelet heartbeat to the NoExecute taint
POD_GC_SECONDS = 20.0
TAINT_EVICTION, POD_GC, GARBAGE_COLLECTOR, KUEUE = "taint manager", "pod gc", "garbage collector", "kueue"
FORCED_DELETION_ACTORS = (POD_GC, GARBAGE_COLLECTOR)  # actors whose deletions may leave processes running


class NodeControllers:
    """Simulates node failures and the controllers that react to them."""

    def __init__(self, server: SimulatedApiServer, k8s_nodes: KubernetesNodes, choices: Choices) -> None:
        self._server = server
        self._k8s_nodes = k8s_nodes
        self._choices = choices
        server.listeners.append(self._on_change)

    def stop_kubelet(self, k8s_node: KubernetesNode) -> None:
        """Stop the kubelet; the pods of the node are evicted after their toleration time."""
        k8s_node.is_kubelet_running = False
        self.partition(k8s_node)

    def partition(self, k8s_node: KubernetesNode) -> None:
        """Disconnect the node from the API server; its containers keep running."""
        k8s_node.connected.clear()
        k8s_node.loss_count += 1
        self._k8s_nodes.spawn(self._evict_after_toleration(k8s_node, k8s_node.loss_count))

    def recover(self, k8s_node: KubernetesNode) -> None:
        """Restart or reconnect the kubelet, and register the node again if its Node object was deleted."""
        k8s_node.is_kubelet_running, k8s_node.is_registered, k8s_node.is_tainted = True, True, False
        k8s_node.connected.set()

    def delete_node(self, k8s_node: KubernetesNode) -> None:
        """Delete the Node object; pod GC then removes the pods of the node."""
        k8s_node.is_registered = False
        self._k8s_nodes.spawn(self._collect_pods(k8s_node, lambda: not k8s_node.is_registered, terminating_only=False))

    def taint_out_of_service(self, k8s_node: KubernetesNode) -> None:
        """Add the out-of-service taint, so that pods are removed without waiting for the kubelet."""
        k8s_node.is_tainted = True
        for key, _ in self._list_pods_on(k8s_node):
            self.disrupt_pod(key, "DeletionByTaintManager", actor=TAINT_EVICTION)
        loss_number = k8s_node.loss_count
        self._k8s_nodes.spawn(
            self._collect_pods(
                k8s_node,
                lambda: not k8s_node.connected.is_set() and k8s_node.loss_count == loss_number,
                terminating_only=True,
            )
        )

    def disrupt_pod(self, key: ObjectKey, reason: str, *, actor: str = "eviction") -> None:
        """Add the DisruptionTarget condition to a pod and delete it, as the eviction API and taint eviction do."""
        if self._add_disruption_target(key, reason, actor=actor):
            self._server.delete(key, {}, actor=actor)

    def evict_by_kueue(self, keys: list[ObjectKey], reason: str, message: str) -> None:
        """Add the TerminationTarget condition to all pods of a Workload that are not terminating, and delete them."""
        condition = {"type": "TerminationTarget", "status": "True", "reason": reason, "message": message}
        for key in keys:
            pod = self._server.get(key)
            if pod is not None and "deletionTimestamp" not in pod["metadata"]:
                self._k8s_nodes.set_condition(key, condition, actor=KUEUE)
                self._server.delete(key, {}, actor=KUEUE)

    def _on_change(self, change: Change) -> None:
        """Let pod GC end a deleted pod that was never assigned to a node, and that a finalizer keeps."""
        if change.kind == "Pod" and change.new_body is not None and _is_unscheduled_and_deleted(change.new_body):
            metadata = change.body["metadata"]
            key = ObjectKey("Pod", metadata["namespace"], metadata["name"])
            self._k8s_nodes.spawn(self._end_unscheduled_pod(key, metadata["uid"]))

    async def _end_unscheduled_pod(self, key: ObjectKey, uid: str) -> None:
        await asyncio.sleep(self._choices.pick((0.1, 0.5, 1.0)) * POD_GC_SECONDS)
        pod = self._server.get(key)
        if pod is not None and pod["metadata"]["uid"] == uid and _is_unscheduled_and_deleted(pod):
            self._k8s_nodes.set_status(key, actor=POD_GC, phase="Failed")

    def _add_disruption_target(self, key: ObjectKey, reason: str, *, actor: str, **fields: str) -> bool:
        pod = self._server.get(key)
        if pod is None or pod["status"].get("phase") in TERMINAL:
            return False
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "evicted"}
        self._k8s_nodes.set_condition(key, condition, actor=actor, **fields)
        return True

    def _list_pods_on(self, k8s_node: KubernetesNode) -> list[tuple[ObjectKey, RawBody]]:
        return [
            (key, pod) for key, pod in self._server.list_objects("Pod") if pod["spec"].get("nodeName") == k8s_node.name
        ]

    async def _evict_after_toleration(self, k8s_node: KubernetesNode, loss_number: int) -> None:
        """Evict each pod of an unreachable node after its toleration time, as taint eviction does."""
        await asyncio.sleep(UNSCHEDULABLE_SECONDS)
        if k8s_node.loss_count == loss_number and not k8s_node.connected.is_set():
            k8s_node.is_tainted = True
        await asyncio.sleep(UNREACHABLE_SECONDS - UNSCHEDULABLE_SECONDS)
        evicted_uids: set[str] = set()  # includes pods that were already terminating
        waited_seconds = 0.0
        while k8s_node.loss_count == loss_number and not k8s_node.connected.is_set():
            remaining = [
                (key, pod) for key, pod in self._list_pods_on(k8s_node) if pod["metadata"]["uid"] not in evicted_uids
            ]
            if not remaining:  # no further pod is assigned to an unreachable node
                return
            for key, pod in remaining:
                if waited_seconds >= _get_toleration_seconds(pod):
                    evicted_uids.add(pod["metadata"]["uid"])
                    self.disrupt_pod(key, "DeletionByTaintManager", actor=TAINT_EVICTION)
            await asyncio.sleep(POLL_SECONDS)
            waited_seconds += POLL_SECONDS

    async def _collect_pods(
        self, k8s_node: KubernetesNode, is_still_needed: Callable[[], bool], *, terminating_only: bool
    ) -> None:
        """Force-delete pods and set their phase to Failed, as pod GC does, even if their processes still run."""
        await asyncio.sleep(self._choices.pick((1.0, 2.0)) * POD_GC_SECONDS)
        while is_still_needed() and (pods := self._list_pods_on(k8s_node)):  # no pod is added once none is left
            for key, pod in pods:
                if terminating_only and "deletionTimestamp" not in pod["metadata"]:
                    continue
                self._add_disruption_target(key, "DeletionByPodGC", actor=POD_GC, phase="Failed")
                self._server.remove(key, actor=POD_GC)
            await asyncio.sleep(POD_GC_SECONDS)


class GarbageCollector:
    """Deletes the children of a deleted owner, as the Kubernetes garbage collector does."""

    def __init__(self, server: SimulatedApiServer, k8s_nodes: KubernetesNodes, choices: Choices) -> None:
        self._server = server
        self._k8s_nodes = k8s_nodes
        self._choices = choices
        server.listeners.append(self._on_change)

    def _on_change(self, change: Change) -> None:
        if change.kind == names.FINETUNEJOB_KIND:
            if change.new_body is None or "deletionTimestamp" in change.body["metadata"]:
                self._k8s_nodes.spawn(self._collect(change.body))
        elif change.old_body is None and (owner := self._find_absent_owner(change.body)):
            self._k8s_nodes.spawn(self._collect(owner))

    def _find_absent_owner(self, body: RawBody) -> RawBody | None:
        """Return the owner reference of a new object if that owner no longer exists."""
        for owner in body["metadata"].get("ownerReferences", ()):
            existing = self._server.get(ObjectKey(owner["kind"], body["metadata"]["namespace"], owner["name"]))
            if existing is None or existing["metadata"]["uid"] != owner["uid"]:
                metadata = {"namespace": body["metadata"]["namespace"], "name": owner["name"], "uid": owner["uid"]}
                return {"kind": owner["kind"], "metadata": metadata}
        return None

    async def _collect(self, owner: RawBody) -> None:
        """Delete the children of a job, then the job if its deletion is in the foreground."""
        await asyncio.sleep(self._choices.pick((0.2, 3.0)))
        key = ObjectKey(owner["kind"], owner["metadata"]["namespace"], owner["metadata"]["name"])
        uid = owner["metadata"]["uid"]
        while children := self._list_children(uid):
            for child in children:
                if "deletionTimestamp" not in (self._server.get(child) or owner)["metadata"]:
                    self._server.delete(child, {}, actor=GARBAGE_COLLECTOR)
            await asyncio.sleep(1.0)
        job = self._server.get(key)
        if job and job["metadata"]["uid"] == uid and FOREGROUND in job["metadata"].get("finalizers", ()):
            self._server.remove(key, actor=GARBAGE_COLLECTOR)

    def _list_children(self, uid: str) -> list[ObjectKey]:
        return [
            key
            for kind in ("Pod", "Service", "ConfigMap", names.POD_GROUP_KIND)
            for key, body in self._server.list_objects(kind)
            if any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences", ()))
        ]


def _is_unscheduled_and_deleted(pod: RawBody) -> bool:
    is_scheduled = bool(pod["spec"].get("nodeName"))
    return "deletionTimestamp" in pod["metadata"] and not is_scheduled and pod["status"].get("phase") not in TERMINAL


def _get_toleration_seconds(pod: RawBody) -> float:
    keys = (t for t in pod["spec"].get("tolerations", ()) if t.get("key") == "node.kubernetes.io/unreachable")
    toleration: RawBody = next(keys, {})
    return float(toleration.get("tolerationSeconds", 300))
