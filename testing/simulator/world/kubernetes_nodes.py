"""Scheduler and kubelets: where pods come to run, what their containers do there, and what is told of it."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from finetune_operator import names
from testing.simulator.world.apiserver import TERMINAL, Change, Key, Raw, SimulatedApiServer, stamp
from testing.simulator.world.choices import Choices
from testing.simulator.world.trainer import EPOCH, Exit, Process, Trainer

POLL_SECONDS = 5.0
PHASE_LAG_SECONDS = 1.1  # the phase comes later than the container's state
ORPHAN_GRACE_SECONDS = 30.0  # of a container whose pod is gone


@dataclass
class Machine:
    """A Kubernetes node; its processes go on when its kubelet dies."""

    name: str
    up: asyncio.Event = field(default_factory=asyncio.Event)  # its kubelet and the API server hear each other
    kubelet: bool = True  # it runs, though it may be cut off
    exists: bool = True  # as an object
    tainted: bool = False  # nothing is placed there
    taken: bool = False  # by other people's pods
    broken: bool = False  # its GPU
    refuses: bool = False  # its kubelet has less room than the scheduler believes
    losses: int = 0

    @property
    def has_room(self) -> bool:
        """As far as the scheduler knows."""
        return self.exists and not self.tainted and not self.taken


class Machines:
    """All of them, the scheduler, and what every kubelet does."""

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

    def machine_of(self, pod: Raw) -> Machine | None:
        """Where a pod runs."""
        return next((m for m in self.machines if m.name == pod["spec"].get("nodeName")), None)

    def processes_on(self, machine: Machine) -> list[Process]:
        """Those that run there, whoever knows."""
        return [process for process, place in self.processes.values() if place is machine and process.alive]

    def break_gpu(self, machine: Machine) -> None:
        """From now on whatever runs there fails soon."""
        machine.broken = True
        for process in self.processes_on(machine):
            self.spawn(self._break(process))

    def set_status(self, key: Key, *, actor: str = "kubelet", **parts: Any) -> None:
        """Replace parts of a pod's status, if it is there."""
        pod = self._server.get(key)
        if pod is not None:
            self._server.change(key, actor=actor, status={**pod["status"], **parts})

    def set_condition(self, key: Key, condition: Raw, *, actor: str = "kubelet", **parts: Any) -> None:
        """Replace one condition of a pod, and parts of its status, if it is there; what is known is not told again."""
        if pod := self._server.get(key):
            others = {told["type"]: told for told in pod["status"].get("conditions", ())}
            before = others.pop(condition["type"], {})
            if parts or before.get("status") != condition["status"]:
                self.set_status(key, actor=actor, conditions=[*others.values(), condition], **parts)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that goes on by itself."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def _hear(self, change: Change) -> None:
        if change.kind != "Pod" or "labels" not in change.body["metadata"]:
            return  # a stranger's pod is only in the way
        if change.before is None:
            self.spawn(self._place(_key(change.body), change.body["metadata"]["uid"]))
        else:
            self._pass_on_deletion(change)

    async def _place(self, key: Key, uid: str) -> None:
        """The scheduler, then the kubelet; of this very pod, not of a later one of its name."""
        await asyncio.sleep(self._choices.pick((0.02, 0.3)))
        while True:
            pod = self._server.get(key)
            if pod is None or pod["metadata"]["uid"] != uid:
                return
            fitting = self._fitting(pod)
            if fitting:
                break
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            self.set_status(key, actor="scheduler", conditions=[unplaced])
            await asyncio.sleep(POLL_SECONDS)
        machine = self._choices.pick(fitting)
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(self._server.now())}
        pod = self._server.change(
            key,
            actor="scheduler",
            spec={**pod["spec"], "nodeName": machine.name},
            status={**pod["status"], "conditions": [placed]},
        )
        assert pod is not None
        await self._run(pod, machine)

    def _fitting(self, pod: Raw) -> list[Machine]:
        """One that is lost is not known to be at first."""
        if not self.room or pod["spec"].get("nodeSelector"):
            return []
        excluded = _excluded_machines(pod)
        occupied = {
            other["spec"].get("nodeName")
            for _, other in self._server.all("Pod")
            if other.get("status", {}).get("phase") not in TERMINAL
        }
        return [machine for machine in self.machines if machine.has_room and machine.name not in excluded | occupied]

    async def _run(self, pod: Raw, machine: Machine) -> None:
        """A kubelet that is cut off starts what it knows of, and hears of its deletion later."""
        key, uid = _key(pod), pod["metadata"]["uid"]
        await asyncio.sleep(self._choices.pick((0.5, 2.0, 6.0)))
        if not machine.kubelet:
            await machine.up.wait()
        while not (machine.up.is_set() and self._is_leaving(key, uid)) and not (self.image and self._mounts(pod)):
            await machine.up.wait()
            self._tell_of_volumes(key, uid, ready=self._mounts(pod))
            if not self.image:
                self._report(key, uid, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
            await asyncio.sleep(POLL_SECONDS)
        if machine.up.is_set() and self._is_leaving(key, uid):
            self._remove(key, uid)
            return
        if machine.refuses and machine.up.is_set():
            self.set_status(key, phase="Failed", reason="OutOfcpu", message="Pod was rejected: not enough cpu")
            return
        process = self._trainer.start(read_process(pod))
        self.processes[uid] = process, machine
        if machine.broken:
            self.spawn(self._break(process))
        state: Raw = {"running": {"startedAt": stamp(self._server.now())}}
        if not machine.up.is_set():
            await machine.up.wait()
            if process.alive and self._is_leaving(key, uid):
                self.spawn(self._terminate(process, machine, after=2.0, grace=ORPHAN_GRACE_SECONDS))
        self._report(key, uid, state, phase="Running")
        await self._report_end(key, uid, process, machine)

    def _tell_of_volumes(self, key: Key, uid: str, *, ready: bool) -> None:
        pod = self._server.get(key)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        since = stamp(self._server.now())
        told = {"type": "PodReadyToStartContainers", "status": str(ready), "lastTransitionTime": since}
        self.set_condition(key, told)

    def _mounts(self, pod: Raw) -> bool:
        """Whether its ConfigMaps are there; if not, only events tell of it."""
        wanted = (volume.get("configMap", {}).get("name") for volume in pod["spec"].get("volumes", ()))
        keys = (Key("ConfigMap", pod["metadata"]["namespace"], name) for name in wanted if name)
        return all(self._server.get(key) for key in keys)

    async def _report_end(self, key: Key, uid: str, process: Process, machine: Machine) -> None:
        how = await process.ended
        finished = EPOCH + timedelta(seconds=process.end_time)  # maybe long ago, if nobody could be told
        state = {"terminated": _terminated(how, finished)}
        await asyncio.sleep(self._choices.pick((0.1, 0.8, 3.0)))
        await machine.up.wait()
        self._report(key, uid, state)
        await asyncio.sleep(PHASE_LAG_SECONDS)
        await machine.up.wait()
        self._report(key, uid, state, phase="Failed" if how.code else "Succeeded")
        if self._is_leaving(key, uid):
            self._remove(key, uid)

    async def _break(self, process: Process) -> None:
        await asyncio.sleep(self._choices.pick((3.0, 10.0)))
        if process.alive:
            words = "CUDA error: uncorrectable ECC error encountered"
            self._trainer.fail(process, error_type="AcceleratorError", message=words)

    def _pass_on_deletion(self, change: Change) -> None:
        """A new deadline is a new SIGTERM; an object that is gone leaves an orphan, which a kubelet ends."""
        metadata = change.body["metadata"]
        process, machine = self.processes.get(metadata["uid"], (None, None))
        if process is None or machine is None or not process.alive:
            return
        before = (change.before or {"metadata": {}})["metadata"].get("deletionTimestamp")
        if change.after is None:
            self.spawn(self._terminate(process, machine, after=2.0, grace=ORPHAN_GRACE_SECONDS))
        elif metadata.get("deletionTimestamp") != before:
            self.spawn(self._terminate(process, machine, after=0.02, grace=metadata["deletionGracePeriodSeconds"]))

    async def _terminate(self, process: Process, machine: Machine, *, after: float, grace: float) -> None:
        await asyncio.sleep(after)
        await machine.up.wait()
        self._trainer.terminate(process, grace)

    def _report(self, key: Key, uid: str, state: Raw, *, phase: str | None = None) -> None:
        pod = self._server.get(key)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        ended = pod["status"].get("phase") in TERMINAL  # a phase that says so is not taken back
        more = {} if phase is None or ended else {"phase": phase}
        self.set_status(key, containerStatuses=[{"name": names.CONTAINER, "state": state}], **more)

    def _is_leaving(self, key: Key, uid: str) -> bool:
        pod = self._server.get(key)
        return pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]

    def _remove(self, key: Key, uid: str) -> None:
        pod = self._server.get(key)
        if pod is not None and pod["metadata"]["uid"] == uid:
            self._server.remove(key, actor="kubelet")


def read_process(pod: Raw) -> Process:
    """The trainer that a pod's container is: what its environment makes of it."""
    labels = pod["metadata"].get("labels", {})
    containers = pod["spec"].get("containers") or [{}]
    environment = {variable["name"]: variable.get("value") for variable in containers[0].get("env", ())}
    job_uid = environment.get(names.ENV_JOB_UID) or labels[names.JOB_UID]
    return Process(
        job_uid=job_uid,
        attempt=int(environment.get(names.ENV_ATTEMPT) or labels[names.ATTEMPT]),
        node_rank=int(environment.get("NODE_RANK") or labels[names.NODE_RANK]),
        num_nodes=int(environment.get("NNODES") or 2),
        rendezvous=f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}/{job_uid}",
        pod_uid=pod["metadata"]["uid"],
    )


def _key(body: Raw) -> Key:
    return Key(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])


def _excluded_machines(pod: Raw) -> set[str]:
    """Those that the pod's node affinity rules out by name, if all of its terms do."""
    node_affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [
        {name for field in term.get("matchFields", ()) if field["operator"] == "NotIn" for name in field["values"]}
        for term in required.get("nodeSelectorTerms", ())
    ]
    return set.intersection(*terms) if terms else set()


def _terminated(how: Exit, finished: datetime) -> Raw:
    reason = how.reason or ("Error" if how.code else "Completed")
    message = how.said.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)
    return {"exitCode": how.code, "reason": reason, "message": message, "finishedAt": stamp(finished)}
