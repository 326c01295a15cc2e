"""Simulated scheduler and kubelets, which assign pods, run their containers and report their state."""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pydantic import TypeAdapter

from finetune_api.termination import Termination
from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.world.apiserver import TERMINAL, Change, ObjectKey, RawBody, SimulatedApiServer, format_time
from testing.simulator.world.choices import Choices
from testing.simulator.world.config_map_cache import ConfigMapCache
from testing.simulator.world.trainer import EPOCH, ContainerExit, Trainer, TrainerProcess

POLL_SECONDS = 5.0
PHASE_LAG_SECONDS = 1.1  # delay of the pod phase after the container state
ORPHAN_GRACE_SECONDS = 30.0  # grace period of a container whose pod object was removed
STRANGERS_SCHEDULER = "strangers-scheduler"  # of pods of other tenants, which are never assigned to a node
FORGED_KEY = "forged"  # key in the ConfigMap of another tenant
_TERMINATION = TypeAdapter(Termination)


@dataclass
class KubernetesNode:
    """A Kubernetes node; its processes keep running when its kubelet stops."""

    name: str
    connected: asyncio.Event = field(default_factory=asyncio.Event)  # set while the kubelet can reach the API server
    is_kubelet_running: bool = True  # also true while the kubelet is partitioned
    is_registered: bool = True  # whether the Node object exists
    is_tainted: bool = False  # unreachable or out of service; no pod is scheduled here
    is_occupied: bool = False  # pods of other users occupy the node
    has_broken_gpu: bool = False
    rejects_pods: bool = False  # the kubelet has fewer free resources than the scheduler assumes
    loss_count: int = 0

    @property
    def pod_ip(self) -> str:
        """IP address of the pod that runs on this node; the next pod gets the same one."""
        return f"10.0.0.{1 + int(self.name.rpartition('-')[2])}"

    @property
    def is_schedulable(self) -> bool:
        """Whether the scheduler may assign a pod to this node."""
        return self.is_registered and not self.is_tainted and not self.is_occupied


class KubernetesNodes:
    """All Kubernetes nodes of the cluster, with their kubelets and the scheduler."""

    def __init__(self, server: SimulatedApiServer, trainer: Trainer, choices: Choices, *, count: int) -> None:
        self.nodes = [KubernetesNode(f"gpu-{number}") for number in range(count)]
        self._nodes_by_name = {k8s_node.name: k8s_node for k8s_node in self.nodes}
        self.processes: dict[str, tuple[TrainerProcess, KubernetesNode]] = {}  # keyed by pod uid
        self.accepts_pods = True  # False while no node has free resources
        self.image_available = True
        self._server = server
        self._trainer = trainer
        self._choices = choices
        self._config_map_cache = ConfigMapCache(server)
        self._tasks: set[asyncio.Task[None]] = set()
        for k8s_node in self.nodes:
            k8s_node.connected.set()
        server.listeners.append(self._on_change)

    def find_k8s_node(self, pod: RawBody) -> KubernetesNode | None:
        """Return the Kubernetes node that the pod was assigned to."""
        return self._nodes_by_name.get(pod["spec"].get("nodeName", ""))

    def find_process_at(self, address: str) -> TrainerProcess | None:
        """Return the newest running process on the node with this pod IP address, if it can be reached."""
        k8s_nodes = (k8s_node for k8s_node in self.nodes if k8s_node.pod_ip == address)
        running = [process for k8s_node in k8s_nodes for process in self.list_processes_on(k8s_node)]
        return running[-1] if running else None

    def list_processes_on(self, k8s_node: KubernetesNode) -> list[TrainerProcess]:
        """Return the running processes of the node, including those that its kubelet does not report."""
        return [process for process, node in self.processes.values() if node is k8s_node and process.is_running]

    def break_gpu(self, k8s_node: KubernetesNode) -> None:
        """Break the GPU of a node, so that all its current and future processes soon fail with an ECC error."""
        k8s_node.has_broken_gpu = True
        for process in self.list_processes_on(k8s_node):
            self.spawn(self._fail_after_delay(process))

    def set_status(self, key: ObjectKey, *, actor: str = "kubelet", **fields: Any) -> None:
        """Replace status fields of a pod if it exists."""
        pod = self._server.get(key)
        if pod is not None:
            self._server.replace_fields(key, actor=actor, status={**pod["status"], **fields})

    def set_condition(self, key: ObjectKey, condition: RawBody, *, actor: str = "kubelet", **fields: Any) -> None:
        """Replace a condition and optional status fields of a pod if the pod exists and something changes."""
        if pod := self._server.get(key):
            others = {other["type"]: other for other in pod["status"].get("conditions", ())}
            before = others.pop(condition["type"], {})
            if fields or before.get("status") != condition["status"]:
                self.set_status(key, actor=actor, conditions=[*others.values(), condition], **fields)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background and raise its exceptions."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._raise_task_error)

    def _raise_task_error(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def _on_change(self, change: Change) -> None:
        if change.kind != "Pod" or "labels" not in change.body["metadata"]:
            return  # a foreign pod never runs; it only occupies a name
        if change.body["spec"].get("schedulerName") == STRANGERS_SCHEDULER:
            return
        was_gated = change.old_body is None or change.old_body["spec"].get("schedulingGates")
        if was_gated and change.new_body is not None and not change.body["spec"].get("schedulingGates"):
            if "schedulingGroup" in change.body["spec"]:
                return  # the gang scheduler assigns the pod
            self.spawn(self._schedule(_build_key(change.body), change.body["metadata"]["uid"]))
        elif change.old_body is not None:
            self._handle_deletion(change)

    async def _schedule(self, key: ObjectKey, uid: str) -> None:
        """Schedule and run the pod with this uid; a later pod of the same name is ignored."""
        await asyncio.sleep(self._choices.pick((0.02, 0.3)))
        while True:
            pod = self._server.get(key)
            if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
                return
            candidates = self.find_schedulable_nodes(pod)
            if candidates:
                break
            unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            self.set_status(key, actor="scheduler", conditions=[unschedulable])
            await asyncio.sleep(POLL_SECONDS)
        k8s_node = self._choices.pick(candidates)
        await self._run_pod(self._assign(key, pod, k8s_node), k8s_node)

    def start_on(self, key: ObjectKey, pod: RawBody, k8s_node: KubernetesNode) -> None:
        """Assign the pod to a node, whose kubelet then runs it."""
        self.spawn(self._run_pod(self._assign(key, pod, k8s_node), k8s_node))

    def _assign(self, key: ObjectKey, pod: RawBody, k8s_node: KubernetesNode) -> RawBody:
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(self._server.now())}
        assigned = self._server.replace_fields(
            key,
            actor="scheduler",
            spec={**pod["spec"], "nodeName": k8s_node.name},
            status={**pod["status"], "conditions": [scheduled]},
        )
        assert assigned is not None
        return assigned

    def find_schedulable_nodes(self, pod: RawBody) -> list[KubernetesNode]:
        """Return the nodes to which the pod can be assigned, including nodes whose loss is not detected yet."""
        if not self.accepts_pods or pod["spec"].get("nodeSelector"):
            return []
        excluded = find_excluded_nodes(pod)
        occupied = {
            other["spec"].get("nodeName")
            for _, other in self._server.list_objects("Pod")
            if other.get("status", {}).get("phase") not in TERMINAL
        }
        return [
            k8s_node for k8s_node in self.nodes if k8s_node.is_schedulable and k8s_node.name not in excluded | occupied
        ]

    async def _run_pod(self, pod: RawBody, k8s_node: KubernetesNode) -> None:
        """Run the pod; a partitioned kubelet starts pods that it received earlier and handles deletions later."""
        key, uid = _build_key(pod), pod["metadata"]["uid"]
        await asyncio.sleep(self._choices.pick((0.5, 2.0, 6.0)))
        if not k8s_node.is_kubelet_running:
            await k8s_node.connected.wait()
        while not (k8s_node.connected.is_set() and self._is_terminating(key, uid)) and not (
            self.image_available and self._has_volumes(pod)
        ):
            await k8s_node.connected.wait()
            self._report_volumes(key, uid, ready=self._has_volumes(pod))
            if not self.image_available:
                self._report_state(key, uid, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
            await asyncio.sleep(POLL_SECONDS)
        if k8s_node.connected.is_set() and self._is_terminating(key, uid):
            self._end_before_start(key, uid)
            return
        if k8s_node.rejects_pods and k8s_node.connected.is_set():
            self.set_status(key, phase="Failed", reason="OutOfcpu", message="Pod was rejected: not enough cpu")
            return
        process = self._trainer.start(read_process(pod, self._mount_config_maps(pod, k8s_node)))
        self.processes[uid] = process, k8s_node
        if k8s_node.has_broken_gpu:
            self.spawn(self._fail_after_delay(process))
        state: RawBody = {"running": {"startedAt": format_time(self._server.now())}}
        if not k8s_node.connected.is_set():
            await k8s_node.connected.wait()
            if process.is_running and self._is_terminating(key, uid):
                self.spawn(self._terminate(process, k8s_node, delay_seconds=2.0, grace_seconds=ORPHAN_GRACE_SECONDS))
        self._report_state(key, uid, state, phase="Running", podIP=k8s_node.pod_ip)
        await self._report_exit(key, uid, process, k8s_node)

    def _end_before_start(self, key: ObjectKey, uid: str) -> None:
        """Report the end of a pod that was deleted during its start, and remove it.

        Its container was not started, or it received SIGTERM before its supervisor could write a termination message.
        """
        state: RawBody = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "could not be located"}
        if exit_code := self._choices.pick((None, None, 2, 143)):
            state = {"exitCode": exit_code, "reason": "Error", "finishedAt": format_time(self._server.now())}
        self._report_state(key, uid, {"terminated": state}, phase="Failed")
        self._remove(key, uid)

    def _report_volumes(self, key: ObjectKey, uid: str, *, ready: bool) -> None:
        pod = self._server.get(key)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        since = format_time(self._server.now())
        condition = {"type": "PodReadyToStartContainers", "status": str(ready), "lastTransitionTime": since}
        self.set_condition(key, condition)

    def _has_volumes(self, pod: RawBody) -> bool:
        """Return whether the pod's ConfigMaps exist; kubelets report missing ones only in events."""
        return all(self._server.get(key) for key in _list_config_map_keys(pod))

    def _mount_config_maps(self, pod: RawBody, k8s_node: KubernetesNode) -> list[RawBody]:
        uid = pod["metadata"]["uid"]
        mounted = (self._config_map_cache.mount(k8s_node.name, key, uid) for key in _list_config_map_keys(pod))
        return [body for body in mounted if body is not None]

    async def _report_exit(self, key: ObjectKey, uid: str, process: TrainerProcess, k8s_node: KubernetesNode) -> None:
        exit_result = await process.exit_future
        finished_at = EPOCH + timedelta(seconds=process.end_time)  # may be long ago if the node was partitioned
        state = {"terminated": _build_terminated_state(exit_result, finished_at)}
        await asyncio.sleep(self._choices.pick((0.1, 0.8, 3.0)))
        await k8s_node.connected.wait()
        self._report_state(key, uid, state)
        await asyncio.sleep(PHASE_LAG_SECONDS)
        await k8s_node.connected.wait()
        self._report_state(key, uid, state, phase="Failed" if exit_result.code else "Succeeded")
        if self._is_terminating(key, uid):
            self._remove(key, uid)

    async def _fail_after_delay(self, process: TrainerProcess) -> None:
        await asyncio.sleep(self._choices.pick((3.0, 10.0)))
        if process.is_running:
            message = "CUDA error: uncorrectable ECC error encountered"
            self._trainer.fail(process, error_type="AcceleratorError", message=message)

    def _handle_deletion(self, change: Change) -> None:
        """Send SIGTERM for each new deletion deadline, and stop orphaned containers of removed pods."""
        metadata = change.body["metadata"]
        process, k8s_node = self.processes.get(metadata["uid"], (None, None))
        if process is None or k8s_node is None or not process.is_running:
            return
        before = (change.old_body or {"metadata": {}})["metadata"].get("deletionTimestamp")
        if change.new_body is None:
            self.spawn(self._terminate(process, k8s_node, delay_seconds=2.0, grace_seconds=ORPHAN_GRACE_SECONDS))
        elif metadata.get("deletionTimestamp") != before:
            self.spawn(
                self._terminate(
                    process, k8s_node, delay_seconds=0.02, grace_seconds=metadata["deletionGracePeriodSeconds"]
                )
            )

    async def _terminate(
        self, process: TrainerProcess, k8s_node: KubernetesNode, *, delay_seconds: float, grace_seconds: float
    ) -> None:
        await asyncio.sleep(delay_seconds)
        await k8s_node.connected.wait()
        self._trainer.terminate(process, grace_seconds)

    def _report_state(
        self, key: ObjectKey, uid: str, state: RawBody, *, phase: str | None = None, **fields: str
    ) -> None:
        pod = self._server.get(key)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        is_terminal = pod["status"].get("phase") in TERMINAL  # a terminal phase never changes
        phase_update = {} if phase is None or is_terminal else {"phase": phase}
        self.set_status(key, containerStatuses=[{"name": names.CONTAINER, "state": state}], **phase_update, **fields)

    def _is_terminating(self, key: ObjectKey, uid: str) -> bool:
        pod = self._server.get(key)
        return pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]

    def _remove(self, key: ObjectKey, uid: str) -> None:
        pod = self._server.get(key)
        if pod is not None and pod["metadata"]["uid"] == uid:
            self._server.remove(key, actor="kubelet")


def read_process(pod: RawBody, config_maps: Iterable[RawBody]) -> TrainerProcess:
    """Build the trainer process of a pod from its environment variables and mounted ConfigMaps."""
    labels, mounted = pod["metadata"].get("labels", {}), tuple(config_maps)
    containers = pod["spec"].get("containers") or [{}]
    environment = {variable["name"]: variable.get("value") for variable in containers[0].get("env", ())}
    job_uid = environment.get(names.ENV_JOB_UID) or labels[names.JOB_UID]
    return TrainerProcess(
        job_uid=job_uid,
        attempt=int(environment.get(names.ENV_ATTEMPT) or labels[names.ATTEMPT]),
        node_rank=int(environment.get("NODE_RANK") or labels[names.NODE_RANK]),
        num_nodes=int(environment.get("NNODES") or 2),
        rendezvous=f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}/{job_uid}",
        pod_uid=pod["metadata"]["uid"],
        spec_job_uids=frozenset(uid for body in mounted if (uid := get_controller_uid(body))),
        has_forged_spec=any(FORGED_KEY in body.get("data", {}) for body in mounted),
    )


def _list_config_map_keys(pod: RawBody) -> list[ObjectKey]:
    config_maps = (volume.get("configMap", {}).get("name") for volume in pod["spec"].get("volumes", ()))
    return [ObjectKey("ConfigMap", pod["metadata"]["namespace"], name) for name in config_maps if name]


def _build_key(body: RawBody) -> ObjectKey:
    return ObjectKey(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])


def find_excluded_nodes(pod: RawBody) -> set[str]:
    """Return the names of the nodes that every required node affinity term of the pod excludes."""
    node_affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [
        {name for field in term.get("matchFields", ()) if field["operator"] == "NotIn" for name in field["values"]}
        for term in required.get("nodeSelectorTerms", ())
    ]
    return set.intersection(*terms) if terms else set()


def _build_terminated_state(exit_result: ContainerExit, finished_at: datetime) -> RawBody:
    reason = exit_result.reason or ("Error" if exit_result.code else "Completed")
    message = exit_result.raw_message or (
        _TERMINATION.dump_json(
            exit_result.termination, by_alias=True, exclude_none=True, exclude_defaults=True
        ).decode()
    )
    return {"exitCode": exit_result.code, "reason": reason, "message": message, "finishedAt": format_time(finished_at)}
