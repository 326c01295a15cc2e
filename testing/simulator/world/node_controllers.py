"""What Kubernetes' own controllers do about nodes that are lost, owners that are gone and pods that nobody tends."""

import asyncio
from collections.abc import Callable

from finetune_operator import names
from testing.simulator.world.apiserver import FOREGROUND, TERMINAL, Change, Key, Raw, SimulatedApiServer
from testing.simulator.world.choices import Choices
from testing.simulator.world.kubernetes_nodes import POLL_SECONDS, Machine, Machines

UNSCHEDULABLE_SECONDS = 50.0  # from a kubelet's last word until nothing is placed there any more
UNREACHABLE_SECONDS = 60.0  # until the NoExecute taint
POD_GC_SECONDS = 20.0
TAINT_MANAGER, POD_GC, GARBAGE_COLLECTOR = "taint manager", "pod gc", "garbage collector"
FORCING = (POD_GC, GARBAGE_COLLECTOR)  # whose deletions may leave processes behind


class NodeControllers:
    """Node lifecycle, taint manager and pod garbage collection; and how machines get lost and found."""

    def __init__(self, server: SimulatedApiServer, machines: Machines, choices: Choices) -> None:
        self._server = server
        self._machines = machines
        self._choices = choices

    def lose(self, machine: Machine) -> None:
        """The kubelet is dead; in time its pods are evicted."""
        machine.kubelet = False
        self.cut_off(machine)

    def cut_off(self, machine: Machine) -> None:
        """Nothing passes between the kubelet and the API server; containers start and end there as before."""
        machine.up.clear()
        machine.losses += 1
        self._machines.spawn(self._give_up(machine, machine.losses))

    def find(self, machine: Machine) -> None:
        """It is back, and registers anew if it has to."""
        machine.kubelet, machine.exists, machine.tainted = True, True, False
        machine.up.set()

    def delete_node(self, machine: Machine) -> None:
        """kubectl delete node, or a cloud that takes a machine away; its pods follow."""
        machine.exists = False
        self._machines.spawn(self._collect_pods(machine, lambda: not machine.exists, terminating_only=False))

    def take_out_of_service(self, machine: Machine) -> None:
        """Somebody who knows that a machine is dead taints it so: nobody waits for its kubelet any more."""
        machine.tainted = True
        for key, _ in self._pods_on(machine):
            self.disrupt(key, "DeletionByTaintManager", actor=TAINT_MANAGER)
        out = machine.losses
        self._machines.spawn(
            self._collect_pods(
                machine, lambda: not machine.up.is_set() and machine.losses == out, terminating_only=True
            )
        )

    def disrupt(self, key: Key, reason: str, *, actor: str = "eviction") -> None:
        """Mark a pod as taken away and delete it, as evictions and the taint manager do."""
        if self._mark(key, reason, actor=actor):
            self._server.delete(key, {}, actor=actor)

    def _mark(self, key: Key, reason: str, *, actor: str, **more: str) -> bool:
        pod = self._server.get(key)
        if pod is None or pod["status"].get("phase") in TERMINAL:
            return False
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "taken away"}
        self._machines.set_condition(key, condition, actor=actor, **more)
        return True

    def _pods_on(self, machine: Machine) -> list[tuple[Key, Raw]]:
        return [(key, pod) for key, pod in self._server.all("Pod") if pod["spec"].get("nodeName") == machine.name]

    async def _give_up(self, machine: Machine, loss: int) -> None:
        """The taint manager: each pod after the time that it tolerates an unreachable node."""
        await asyncio.sleep(UNSCHEDULABLE_SECONDS)
        if machine.losses == loss and not machine.up.is_set():
            machine.tainted = True
        await asyncio.sleep(UNREACHABLE_SECONDS - UNSCHEDULABLE_SECONDS)
        evicted: set[str] = set()  # those that are being deleted are marked, too
        waited = 0.0
        while machine.losses == loss and not machine.up.is_set():
            staying = [(key, pod) for key, pod in self._pods_on(machine) if pod["metadata"]["uid"] not in evicted]
            if not staying:  # and nothing comes any more
                return
            for key, pod in staying:
                if waited >= _tolerated_seconds(pod):
                    evicted.add(pod["metadata"]["uid"])
                    self.disrupt(key, "DeletionByTaintManager", actor=TAINT_MANAGER)
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS

    async def _collect_pods(self, machine: Machine, wanted: Callable[[], bool], *, terminating_only: bool) -> None:
        """Pod GC: failed in the API, then gone by force, whatever still runs."""
        await asyncio.sleep(self._choices.pick((1.0, 2.0)) * POD_GC_SECONDS)
        while wanted() and (pods := self._pods_on(machine)):  # where there are none, none will come
            for key, pod in pods:
                if terminating_only and "deletionTimestamp" not in pod["metadata"]:
                    continue
                self._mark(key, "DeletionByPodGC", actor=POD_GC, phase="Failed")
                self._server.remove(key, actor=POD_GC)
            await asyncio.sleep(POD_GC_SECONDS)


class GarbageCollector:
    """What an owner leaves behind follows it."""

    def __init__(self, server: SimulatedApiServer, machines: Machines, choices: Choices) -> None:
        self._server = server
        self._machines = machines
        self._choices = choices
        server.listeners.append(self._hear)

    def _hear(self, change: Change) -> None:
        if change.kind == names.FINETUNEJOB_KIND:
            if change.after is None or "deletionTimestamp" in change.body["metadata"]:
                self._machines.spawn(self._collect(change.body))
        elif change.before is None and (owner := self._absent_owner(change.body)):
            self._machines.spawn(self._collect(owner))

    def _absent_owner(self, body: Raw) -> Raw | None:
        """The job that a new object says it belongs to, if that is gone already."""
        for owner in body["metadata"].get("ownerReferences", ()):
            there = self._server.get(Key(owner["kind"], body["metadata"]["namespace"], owner["name"]))
            if there is None or there["metadata"]["uid"] != owner["uid"]:
                metadata = {"namespace": body["metadata"]["namespace"], "name": owner["name"], "uid": owner["uid"]}
                return {"kind": owner["kind"], "metadata": metadata}
        return None

    async def _collect(self, owner: Raw) -> None:
        """What the job owned, then a job that waits for it."""
        await asyncio.sleep(self._choices.pick((0.2, 3.0)))
        key = Key(owner["kind"], owner["metadata"]["namespace"], owner["metadata"]["name"])
        uid = owner["metadata"]["uid"]
        while children := self._children(uid):
            for child in children:
                if "deletionTimestamp" not in (self._server.get(child) or owner)["metadata"]:
                    self._server.delete(child, {}, actor=GARBAGE_COLLECTOR)
            await asyncio.sleep(1.0)
        job = self._server.get(key)
        if job and job["metadata"]["uid"] == uid and FOREGROUND in job["metadata"].get("finalizers", ()):
            self._server.remove(key, actor=GARBAGE_COLLECTOR)

    def _children(self, uid: str) -> list[Key]:
        return [
            key
            for kind in ("Pod", "Service", "ConfigMap")
            for key, body in self._server.all(kind)
            if any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences", ()))
        ]


def _tolerated_seconds(pod: Raw) -> float:
    keys = (t for t in pod["spec"].get("tolerations", ()) if t.get("key") == "node.kubernetes.io/unreachable")
    toleration: Raw = next(keys, {})
    return float(toleration.get("tolerationSeconds", 300))
