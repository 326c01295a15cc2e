"""Simulated scheduler of Kubernetes 1.37 for the pods of PodGroups, which are placed and preempted together."""

import asyncio

from finetune_operator import names
from testing.simulator.world.apiserver import TERMINAL, Change, ObjectKey, RawBody, SimulatedApiServer
from testing.simulator.world.choices import Choices
from testing.simulator.world.kubernetes_nodes import KubernetesNode, KubernetesNodes, find_excluded_nodes

SCHEDULER = "scheduler"  # actor of the commits
POLL_SECONDS = 5.0
PRIORITIES = {"": 0, "low": 100, "high": 1000}  # by name of the PriorityClass
PREEMPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "default-scheduler: preempting to accommodate a higher priority pod",
}

Pods = list[tuple[ObjectKey, RawBody]]


class GangScheduler:
    """Assigns all pods of a PodGroup at once, in the order of priority and age, and preempts whole PodGroups.

    A group without its PodGroup, or with fewer pods than minCount, is not tried, and its pods have no condition.
    """

    def __init__(self, server: SimulatedApiServer, k8s_nodes: KubernetesNodes, choices: Choices) -> None:
        self._server = server
        self._k8s_nodes = k8s_nodes
        self._choices = choices
        self._has_changed = asyncio.Event()
        server.listeners.append(self._on_change)
        k8s_nodes.spawn(self._run())

    def list_placed_pods(self, group: ObjectKey) -> Pods:
        """Return the pods of a group that occupy Kubernetes nodes."""
        pods = self._list_groups().get(group, [])
        return [(key, pod) for key, pod in pods if pod["spec"].get("nodeName")]

    def preempt(self, group: ObjectKey) -> None:
        """Delete all placed pods of a group in favour of pods of higher priority."""
        for key, pod in self.list_placed_pods(group):
            if "deletionTimestamp" not in pod["metadata"]:
                self._k8s_nodes.set_condition(key, PREEMPTED, actor=SCHEDULER)
                self._server.delete(key, {}, actor=SCHEDULER)

    async def _run(self) -> None:
        """Schedule after each change, and periodically while pods wait, because nodes recover without an event."""
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS if self._list_waiting_groups() else None):
                    await self._has_changed.wait()
                await asyncio.sleep(self._choices.pick((0.02, 0.3)))
            except TimeoutError:
                pass
            self._has_changed.clear()
            self._schedule()

    def _on_change(self, change: Change) -> None:
        is_member = change.kind == "Pod" and "schedulingGroup" in change.body.get("spec", {})
        if is_member or change.kind == names.POD_GROUP_KIND:
            self._has_changed.set()

    def _list_groups(self) -> dict[ObjectKey, Pods]:
        """Return the pods of each group that have not ended."""
        groups: dict[ObjectKey, Pods] = {}
        for key, pod in self._server.list_objects("Pod"):
            name = pod.get("spec", {}).get("schedulingGroup", {}).get("podGroupName")
            if name and pod["status"].get("phase") not in TERMINAL:
                groups.setdefault(ObjectKey(names.POD_GROUP_KIND, key.namespace, name), []).append((key, pod))
        return groups

    def _list_waiting_groups(self) -> list[tuple[RawBody, Pods]]:
        """Return the complete PodGroups with the pods that are not placed, those of high priority and old ones first.

        Pods that are being deleted do not count.
        """
        waiting = []
        for group, pods in self._list_groups().items():
            members = [(key, pod) for key, pod in pods if "deletionTimestamp" not in pod["metadata"]]
            pod_group = self._server.get(group)
            if pod_group is None or len(members) < _get_min_count(pod_group):
                continue
            if unplaced := [(key, pod) for key, pod in members if not pod["spec"].get("nodeName")]:
                waiting.append((pod_group, unplaced))
        return sorted(waiting, key=lambda item: (-_get_priority(item[0]), item[0]["metadata"]["creationTimestamp"]))

    def _schedule(self) -> None:
        """Place the groups for which there is room, and make room for the others."""
        for pod_group, pods in self._list_waiting_groups():
            k8s_nodes = self._k8s_nodes.find_schedulable_nodes(pods[0][1])
            if len(k8s_nodes) >= len(pods):
                for key, pod in pods:
                    k8s_node = self._choices.pick(k8s_nodes)
                    k8s_nodes.remove(k8s_node)
                    self._k8s_nodes.start_on(key, pod, k8s_node)
            elif self._make_room(pod_group, pods, num_free=len(k8s_nodes)):
                return  # the room of the preempted groups is for this one
            else:
                self._report_unschedulable(pods, _get_min_count(pod_group), num_free=len(k8s_nodes))

    def _make_room(self, pod_group: RawBody, pods: Pods, *, num_free: int) -> bool:
        """Preempt groups of lower priority if that suffices, first those that already end, then the lowest priority."""
        if not self._k8s_nodes.accepts_pods:
            return False
        victims = []
        for group in self._list_groups():
            priority, k8s_nodes = _get_priority(self._server.get(group) or {}), self._find_nodes(group, pods[0][1])
            if k8s_nodes and priority < _get_priority(pod_group):
                is_ending = all("deletionTimestamp" in pod["metadata"] for _, pod in self.list_placed_pods(group))
                victims.append((not is_ending, priority, group, len(k8s_nodes)))
        chosen = []
        for _, _, group, count in sorted(victims):
            if num_free < len(pods):
                chosen.append(group)
                num_free += count
        if num_free < len(pods):
            return False
        for group in chosen:
            self.preempt(group)
        return True

    def _find_nodes(self, group: ObjectKey, pod: RawBody) -> list[KubernetesNode]:
        """Return the Kubernetes nodes that this pod could use if the group did not occupy them."""
        k8s_nodes = [self._k8s_nodes.find_k8s_node(other) for _, other in self.list_placed_pods(group)]
        excluded = find_excluded_nodes(pod)
        return [node for node in k8s_nodes if node is not None and node.is_schedulable and node.name not in excluded]

    def _report_unschedulable(self, pods: Pods, min_count: int, *, num_free: int) -> None:
        """Write the result of the group on all pods, except on the one for which there is no room.

        That one has a message of its own. The scheduler considers the pods of a group in any order, so it is not
        necessarily the last one.
        """
        group_message = (
            "pod group is unschedulable, pod group is unschedulable, 0/1 placements are available, first placement"
            f" status: minCount ({min_count}) cannot be satisfied: {num_free} scheduled, 0 remaining, pod group"
            " preemption: No preemption victims found"
        )
        (without_room, _), *_ = pods
        for key, _ in pods:
            message = (
                "0/2 nodes are available: 2 Insufficient example.com/slot." if key == without_room else group_message
            )
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            self._k8s_nodes.set_status(key, actor=SCHEDULER, conditions=[condition])


def _get_min_count(pod_group: RawBody) -> int:
    return int(pod_group["spec"]["schedulingPolicy"]["gang"]["minCount"])


def _get_priority(pod_group: RawBody) -> int:
    return PRIORITIES[pod_group.get("spec", {}).get("priorityClassName", "")]
