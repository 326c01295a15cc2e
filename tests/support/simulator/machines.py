"""Scheduler, kubelets, taint manager and garbage collector: what happens to pods besides the operator."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from finetune_operator import names
from support.simulator.apiserver import FOREGROUND, TERMINAL, Change, Key, Raw, SimulatedApiServer, stamp
from support.simulator.choices import Choices
from support.simulator.trainer import Exit, Process, Trainer

POLL_SECONDS = 5.0
UNREACHABLE_SECONDS = 60.0  # from a kubelet's death to the NoExecute taint
PHASE_LAG_SECONDS = 1.1  # the phase comes later than the container's state


@dataclass
class Machine:
    """A Kubernetes node; its processes go on when its kubelet dies."""

    name: str
    up: asyncio.Event = field(default_factory=asyncio.Event)
    losses: int = 0


class Machines:
    """All of them, and the controllers that Kubernetes has for pods."""

    def __init__(self, server: SimulatedApiServer, trainer: Trainer, choices: Choices, *, count: int) -> None:
        self.machines = [Machine(f"gpu-{number}") for number in range(count)]
        self.processes: dict[str, tuple[Process, Machine]] = {}  # by pod uid
        self.room = True  # for another pod
        self.image = True  # can be pulled
        self._server = server
        self._trainer = trainer
        self._choices = choices
        self._tasks: set[asyncio.Task[None]] = set()
        for machine in self.machines:
            machine.up.set()
        server.listeners.append(self._hear)

    def lose(self, machine: Machine) -> None:
        """The kubelet is gone; in time its pods are evicted."""
        machine.up.clear()
        machine.losses += 1
        self._spawn(self._evict_lost(machine, machine.losses))

    def find(self, machine: Machine) -> None:
        """The kubelet is back."""
        machine.up.set()

    def disrupt(self, key: Key, reason: str) -> None:
        """Mark a pod as taken away and delete it, as evictions and the taint manager do."""
        pod = self._server.get(key)
        if pod is None or pod["status"].get("phase") in TERMINAL:
            return
        others = [c for c in pod["status"].get("conditions", ()) if c["type"] != "DisruptionTarget"]
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "taken away"}
        self._set_status(key, conditions=[*others, condition])
        self._server.delete(key, {}, actor="eviction")

    def machine_of(self, pod: Raw) -> Machine | None:
        """Where a pod runs."""
        return next((m for m in self.machines if m.name == pod["spec"].get("nodeName")), None)

    def _hear(self, change: Change) -> None:
        if names.JOB_UID not in change.body["metadata"].get("labels", {}) and change.kind == "Pod":
            return  # a stranger's, that is only in the way
        if change.kind == "Pod" and change.before is None:
            self._spawn(self._place(_key(change.body), change.body["metadata"]["uid"]))
        elif change.kind == "Pod":
            self._pass_on_deletion(change)
        if change.kind == names.FINETUNEJOB_KIND:
            if change.after is None or "deletionTimestamp" in change.body["metadata"]:
                self._spawn(self._collect(change.body))
        elif change.before is None and (owner := self._absent_owner(change.body)):
            self._spawn(self._collect(owner))

    def _absent_owner(self, body: Raw) -> Raw | None:
        """The job that a new object says it belongs to, if that is gone already."""
        for owner in body["metadata"].get("ownerReferences", ()):
            there = self._server.get(Key(owner["kind"], body["metadata"]["namespace"], owner["name"]))
            if there is None or there["metadata"]["uid"] != owner["uid"]:
                metadata = {"namespace": body["metadata"]["namespace"], "name": owner["name"], "uid": owner["uid"]}
                return {"kind": owner["kind"], "metadata": metadata}
        return None

    async def _place(self, key: Key, uid: str) -> None:
        """The scheduler, then the kubelet; of this very pod, not of a later one of its name."""
        await asyncio.sleep(self._choices.pick((0.02, 0.3)))
        while True:
            pod = self._server.get(key)
            if pod is None or pod["metadata"]["uid"] != uid:
                return
            free = [machine for machine in self.machines if machine.up.is_set()]
            if self.room and free and not pod["spec"].get("nodeSelector"):
                break
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            self._set_status(key, conditions=[unplaced])
            await asyncio.sleep(POLL_SECONDS)
        machine = self._choices.pick(free)
        placed = {"type": "PodScheduled", "status": "True"}
        self._server.change(
            key,
            actor="scheduler",
            spec={**pod["spec"], "nodeName": machine.name},
            status={**pod["status"], "conditions": [placed]},
        )
        await self._run(key, uid, machine)

    async def _run(self, key: Key, uid: str, machine: Machine) -> None:
        await asyncio.sleep(self._choices.pick((0.5, 2.0, 6.0)))
        await machine.up.wait()
        while not self.image:
            if self._is_leaving(key, uid):
                break
            self._report(key, uid, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
            await asyncio.sleep(POLL_SECONDS)
            await machine.up.wait()
        if self._is_leaving(key, uid):
            self._remove(key, uid)
            return
        pod = self._server.get(key)
        assert pod is not None
        process = self._trainer.start(_process(pod))
        self.processes[uid] = process, machine
        self._report(key, uid, {"running": {}}, phase="Running")
        how = await process.ended
        state = {"terminated": _terminated(how, self._server.now())}
        await asyncio.sleep(self._choices.pick((0.1, 0.8, 3.0)))
        await machine.up.wait()
        self._report(key, uid, state)
        await asyncio.sleep(PHASE_LAG_SECONDS)
        await machine.up.wait()
        self._report(key, uid, state, phase="Failed" if how.code else "Succeeded")
        if self._is_leaving(key, uid):
            self._remove(key, uid)

    def _pass_on_deletion(self, change: Change) -> None:
        """A new deadline is a new SIGTERM; an object that is gone leaves an orphan, which a kubelet ends."""
        metadata = change.body["metadata"]
        process, machine = self.processes.get(metadata["uid"], (None, None))
        if process is None or machine is None or not process.alive:
            return
        before = (change.before or {"metadata": {}})["metadata"].get("deletionTimestamp")
        if change.after is None:
            self._spawn(self._terminate(process, machine, after=2.0, grace=30.0))
        elif metadata.get("deletionTimestamp") != before:
            self._spawn(self._terminate(process, machine, after=0.02, grace=metadata["deletionGracePeriodSeconds"]))

    async def _terminate(self, process: Process, machine: Machine, *, after: float, grace: float) -> None:
        await asyncio.sleep(after)
        await machine.up.wait()
        self._trainer.terminate(process, grace)

    async def _evict_lost(self, machine: Machine, loss: int) -> None:
        """The taint manager: each pod after the time that it tolerates an unreachable node."""
        await asyncio.sleep(UNREACHABLE_SECONDS)
        evicted: set[str] = set()
        waited = 0.0
        while machine.losses == loss and not machine.up.is_set():
            for key, pod in self._server.all("Pod"):
                tolerated = _tolerated_seconds(pod)
                if self.machine_of(pod) is machine and waited >= tolerated and pod["metadata"]["uid"] not in evicted:
                    evicted.add(pod["metadata"]["uid"])
                    self.disrupt(key, "DeletionByTaintManager")
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS

    async def _collect(self, owner: Raw) -> None:
        """The garbage collector: what the job owned, then a job that waits for it."""
        await asyncio.sleep(self._choices.pick((0.2, 3.0)))
        uid = owner["metadata"]["uid"]
        while True:
            children = [
                key
                for kind in ("Pod", "Service", "ConfigMap")
                for key, body in self._server.all(kind)
                if any(ref["uid"] == uid for ref in body["metadata"].get("ownerReferences", ()))
            ]
            for key in children:
                if "deletionTimestamp" not in (self._server.get(key) or owner)["metadata"]:
                    self._server.delete(key, {}, actor="garbage collector")
            job = self._server.get(_key(owner))
            waits = (
                job is not None
                and job["metadata"]["uid"] == uid
                and FOREGROUND in job["metadata"].get("finalizers", ())
            )
            if not children:
                if waits:
                    self._server.remove(_key(owner), actor="garbage collector")
                return
            await asyncio.sleep(1.0)

    def _report(self, key: Key, uid: str, state: Raw, *, phase: str | None = None) -> None:
        if self._is_there(key, uid):
            more = {} if phase is None else {"phase": phase}
            self._set_status(key, containerStatuses=[{"name": names.CONTAINER, "state": state}], **more)

    def _set_status(self, key: Key, **parts: Any) -> None:
        pod = self._server.get(key)
        if pod is not None:
            self._server.change(key, actor="kubelet", status={**pod["status"], **parts})

    def _is_there(self, key: Key, uid: str) -> bool:
        pod = self._server.get(key)
        return pod is not None and pod["metadata"]["uid"] == uid

    def _is_leaving(self, key: Key, uid: str) -> bool:
        pod = self._server.get(key)
        return pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]

    def _remove(self, key: Key, uid: str) -> None:
        if self._is_there(key, uid):
            self._server.remove(key, actor="kubelet")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()


def _key(body: Raw) -> Key:
    return Key(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])


def _process(pod: Raw) -> Process:
    """The trainer that a pod's container is."""
    labels = pod["metadata"]["labels"]
    containers = pod["spec"].get("containers") or [{}]
    environment = {variable["name"]: variable.get("value") for variable in containers[0].get("env", ())}
    return Process(
        attempt=int(labels[names.ATTEMPT]),
        node_rank=int(labels[names.NODE_RANK]),
        num_nodes=int(environment.get("NNODES") or 2),
        pod_uid=pod["metadata"]["uid"],
    )


def _terminated(how: Exit, finished: datetime) -> Raw:
    reason = how.reason or ("Error" if how.code else "Completed")
    message = how.said.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)
    return {"exitCode": how.code, "reason": reason, "message": message, "finishedAt": stamp(finished)}


def _tolerated_seconds(pod: Raw) -> float:
    keys = (t for t in pod["spec"].get("tolerations", ()) if t.get("key") == "node.kubernetes.io/unreachable")
    toleration: Raw = next(keys, {})
    return float(toleration.get("tolerationSeconds", 300))
