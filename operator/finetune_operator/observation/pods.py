"""Defines Observation, the observed state of a job's children, and parses raw pods into it.

observation.read_evidence reads the evidence of a node, finetune_api.termination parses its termination message, and
controller.gather builds the Observation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from finetune_api.termination import Outcome, Termination, parse_termination
from finetune_api.v1alpha1.status import Evidence, Progress
from finetune_operator import names
from finetune_operator.observation.group_apis import GroupApis
from finetune_operator.observation.ownership import (
    RawBody,
    find_owning_job,
    get_start_key,
    has_job_label,
    parse_time,
)
from finetune_operator.observation.read_evidence import find_condition, read_evidence
from finetune_operator.observation.workload import GATED, WorkloadObservation
from finetune_supervisor.messages import Degradation

# time after its deletion deadline during which a pod deleted by the taint manager may still run
FENCED_AFTER_SECONDS = 30
# the same for any other deleted pod, because another disruption may hide the loss of its kubelet
OVERDUE_SECONDS = 300
# the largest grace period that is subtracted from the deletion deadline; a user can request any int64
MAX_GRACE_SECONDS = 365 * 24 * 3600


class PodPhase(StrEnum):
    """Phase of a pod, derived from the state of the trainer container."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"  # exit code 0, regardless of the termination message
    FAILED = "Failed"
    GONE = "Gone"


@dataclass(frozen=True)
class WaitingState:
    """Reason why a pod does not start, because one of its containers is waiting or the pod is unscheduled."""

    reason: str
    message: str
    image_source: str = "spec.image"  # field or container that defines the image
    gates: tuple[str, ...] = ()  # scheduling gates of an unscheduled pod


@dataclass(frozen=True)
class NodeObservation:
    """Observation of one pod, from its current object or its tombstone."""

    attempt: int
    node_rank: int
    pod_name: str
    uid: str
    phase: PodPhase
    is_terminating: bool
    deletion_deadline: datetime | None  # end of the grace period
    is_scheduled: bool
    waiting: WaitingState | None
    evidence: Evidence
    termination: Termination | None
    deletion_requested_at: datetime | None = None  # None if the pod is not terminating
    image: str = ""  # image in the spec of the trainer container
    image_id: str = ""  # image that the kubelet reports, usually `repository@digest`
    scheduled_at: datetime | None = None  # when the pod was assigned to its Kubernetes node
    started_at: datetime | None = None
    container_creating_since: datetime | None = None  # later transition of PodScheduled and PodReadyToStartContainers
    ready_to_start: bool | None = None  # condition PodReadyToStartContainers; None if the kubelet does not report it
    start_key: str = ""  # annotation that the operator gives the pods of an attempt
    is_relabelled: bool = False  # whether a user changed the label that informers select by
    was_restarted: bool = False  # in-place restart by the kubelet, for example after an image edit
    is_in_pod_group: bool = False  # whether the API server stored spec.schedulingGroup
    is_managed_by_kueue: bool = False  # whether Kueue's webhook has seen the pod
    is_held_by_kueue: bool = False  # whether Kueue's finalizer keeps the object and its quota
    sidecar_running_since: datetime | None = None  # finish time of the trainer, if a sidecar is still running

    @property
    def k8s_node(self) -> str:
        """Name of the Kubernetes node of the pod; empty before scheduling."""
        return self.evidence.k8s_node

    @property
    def has_ended(self) -> bool:
        """Whether the trainer container has terminated or the pod no longer exists."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED, PodPhase.GONE)

    @property
    def has_succeeded(self) -> bool:
        """Whether the node exited with code 0 and reported success; the exit code alone is not sufficient."""
        return self.evidence.exit_code == 0 and self.evidence.outcome == Outcome.SUCCEEDED

    @property
    def has_disappeared(self) -> bool:
        """Whether the pod is missing without an observed deletion or termination."""
        return self.phase is PodPhase.GONE and self.deletion_deadline is None and self.evidence.exit_code is None

    def get_container_creating_duration(self, now: datetime) -> timedelta | None:
        """Return how long the container has been in ContainerCreating; None if it is in another state."""
        if self.phase is not PodPhase.PENDING or self.container_creating_since is None or self.waiting is not None:
            return None
        return now - self.container_creating_since

    def may_run(self, now: datetime) -> bool:
        """Return whether a process of the pod may run now or later: the pod is neither terminated nor fenced."""
        if self.has_ended:
            return False
        if self.deletion_deadline is None:
            return True
        # a deleted pod is never assigned to a node; Kueue's finalizer keeps the object in phase Pending
        if not self.is_scheduled:
            return False
        k8s_node_lost = self.evidence.disruption == "DeletionByTaintManager"
        fenced_after = FENCED_AFTER_SECONDS if k8s_node_lost else OVERDUE_SECONDS
        return (now - self.deletion_deadline).total_seconds() < fenced_after


@dataclass(frozen=True)
class RejectedCreate:
    """Create request that the API server rejected, or that failed because another object has the same name.

    `name_taken`: the other object does not belong to the job.
    `predecessor_terminating`: the other object is a child of a deleted job of the same name, and will be deleted.
    """

    kind: str
    name: str
    status: int
    message: str
    name_taken: bool = False
    predecessor_terminating: bool = False


@dataclass(frozen=True)
class Claim:
    """PersistentVolumeClaim that the job mounts."""

    name: str
    access_modes: tuple[str, ...]


@dataclass(frozen=True)
class Observation:
    """Observed state of a job's children; `is_fresh` if the pods were listed by a quorum read in this pass."""

    nodes: tuple[NodeObservation, ...] = ()
    service_exists: bool = False  # whether a headless Service exists that selects the pods
    edited_service_uid: str = ""  # uid of the Service if an edit made it unusable
    progress: Progress | None = None
    degraded: tuple[Degradation, ...] | None = None  # reported by the current attempt; None if it was not polled
    unreachable_endpoint: str = ""  # host:port of a progress server that does not respond
    group_apis: GroupApis | None = None  # providers in the cluster; None unless a starting attempt needs one
    waits_for_queue: bool = False  # whether the pods wait for Kueue
    workload: WorkloadObservation | None = None  # of pods that wait for Kueue; None if it does not exist yet
    claims: tuple[Claim, ...] | None = None
    rejected_creates: tuple[RejectedCreate, ...] = ()
    create_delay: timedelta = timedelta()  # how long to wait with the next create, because the last one was rejected
    predecessor_nodes: tuple[NodeObservation, ...] = ()  # of deleted jobs of the same name
    expected_pods: frozenset[str] = frozenset()  # names of pods that were created seconds ago
    sent_deletions: Mapping[str, int] = field(default_factory=dict)  # of the last seconds: grace period by uid
    missing_rights: tuple[str, ...] = ()  # that the API server refuses to the operator in the job's namespace
    is_fresh: bool = False

    def nodes_of_attempt(self, attempt: int) -> tuple[NodeObservation, ...]:
        """Return one observation per node rank of an attempt, preferring a live pod to a tombstone."""
        nodes_by_rank: dict[int, NodeObservation] = {}
        for node in self.nodes:
            known_node = nodes_by_rank.get(node.node_rank)
            if node.attempt == attempt and (known_node is None or known_node.phase is PodPhase.GONE):
                nodes_by_rank[node.node_rank] = node
        return tuple(nodes_by_rank[rank] for rank in sorted(nodes_by_rank))

    def live_nodes(self) -> tuple[NodeObservation, ...]:
        """Return the existing pods of all attempts."""
        return tuple(node for node in self.nodes if node.phase is not PodPhase.GONE)


def observe_pods(
    pods: Iterable[RawBody],
    tombstones: Iterable[RawBody],
    *,
    parse_pod: "PodParser | None" = None,
) -> tuple[NodeObservation, ...]:
    """Parse live pods and tombstones; the tombstone of a pod that still exists is ignored.

    parse_pod: a function with the results of `observe_pod`, for example one that caches them.
    """
    parse_pod = parse_pod or observe_pod
    live_pods = [parse_pod(pod, is_tombstone=False) for pod in pods]
    live_uids = {node.uid for node in live_pods if node}
    gone_pods = [parse_pod(pod, is_tombstone=True) for pod in tombstones if pod["metadata"].get("uid") not in live_uids]
    return tuple(node for node in (*live_pods, *gone_pods) if node)


class PodParser(Protocol):
    """Function that parses one pod as `observe_pod` does."""

    def __call__(self, pod: RawBody, *, is_tombstone: bool) -> NodeObservation | None:
        """Parse one pod; return None if its name does not belong to a node of its controlling job."""


def observe_pod(pod: RawBody, *, is_tombstone: bool) -> NodeObservation | None:
    """Parse one pod; return None if its name does not belong to a node of its controlling job."""
    metadata, status, owner = pod["metadata"], pod.get("status") or {}, find_owning_job(pod)
    attempt_and_rank = names.parse_pod_name(metadata["name"], owner.name) if owner else None
    if attempt_and_rank is None:
        return None
    attempt, node_rank = attempt_and_rank
    container = _select_container_status(status)
    terminated_state = _find_first_termination(container)
    message = (terminated_state or {}).get("message")
    termination = parse_termination(message)
    deletion_deadline = parse_time(metadata.get("deletionTimestamp"))
    grace_seconds = metadata.get("deletionGracePeriodSeconds") or 0
    grace_period = timedelta(seconds=min(max(grace_seconds, 0), MAX_GRACE_SECONDS))
    scheduled_condition = find_condition(status, "PodScheduled")
    ready_condition = find_condition(status, "PodReadyToStartContainers")
    return NodeObservation(
        attempt=attempt,
        node_rank=node_rank,
        pod_name=metadata["name"],
        uid=metadata.get("uid", ""),
        phase=_derive_pod_phase(status, container, is_tombstone=is_tombstone),
        is_terminating=metadata.get("deletionTimestamp") is not None,
        deletion_deadline=deletion_deadline,
        deletion_requested_at=deletion_deadline - grace_period if deletion_deadline else None,
        is_scheduled=bool((pod.get("spec") or {}).get("nodeName")),
        waiting=_find_waiting_state(pod, container),
        evidence=read_evidence(
            pod, terminated_state or {}, termination, node_rank=node_rank, is_tombstone=is_tombstone
        ),
        termination=termination,
        image=_find_trainer_image(pod),
        image_id=container.get("imageID") or "",
        scheduled_at=_find_true_since(scheduled_condition),
        started_at=parse_time(((container.get("state") or {}).get("running") or {}).get("startedAt")),
        container_creating_since=_find_container_creating_start(scheduled_condition, ready_condition),
        was_restarted=_is_restarted(status, container, terminated_state),
        start_key=get_start_key(pod),
        is_relabelled=not is_tombstone and not has_job_label(pod),
        is_in_pod_group=bool((pod.get("spec") or {}).get("schedulingGroup")),
        is_managed_by_kueue=names.KUEUE_MANAGED in (metadata.get("labels") or {}),
        is_held_by_kueue=not is_tombstone and names.KUEUE_FINALIZER in (metadata.get("finalizers") or ()),
        sidecar_running_since=_find_sidecar_start(status, terminated_state),
        ready_to_start={"True": True, "False": False}.get(ready_condition.get("status", "")),
    )


def _select_container_status(status: RawBody) -> RawBody:
    """Return the status of the trainer container, or of a failed init container that prevents its start."""
    trainer: RawBody = next((c for c in status.get("containerStatuses") or [] if c.get("name") == names.CONTAINER), {})
    if {"running", "terminated"} & (trainer.get("state") or {}).keys():
        return trainer
    init_containers = status.get("initContainerStatuses") or []
    failed = (c for c in init_containers if ((c.get("state") or {}).get("terminated") or {}).get("exitCode"))
    return next(failed, trainer)


def _find_trainer_image(pod: RawBody) -> str:
    containers = (pod.get("spec") or {}).get("containers") or []
    return next((c.get("image") or "" for c in containers if c.get("name") == names.CONTAINER), "")


def _find_first_termination(container: RawBody) -> RawBody | None:
    """Return the first terminated state of the container; the process of an in-place restart is not in the gang."""
    current: RawBody | None = (container.get("state") or {}).get("terminated")
    has_restarted = container.get("restartCount") or 0
    return (container.get("lastState") or {}).get("terminated") if current is None and has_restarted else current


def _is_restarted(status: RawBody, container: RawBody, terminated_state: RawBody | None) -> bool:
    """Return whether the kubelet performed an in-place restart of the container.

    The kubelet also reports lastState when it evicts a pod with a finished container, which is not a restart.
    """
    is_finished = status.get("phase") in ("Succeeded", "Failed")
    return terminated_state is not None and not is_finished and "terminated" not in (container.get("state") or {})


def _derive_pod_phase(status: RawBody, container: RawBody, *, is_tombstone: bool) -> PodPhase:
    """Derive the phase from the container state, which changes about a second before the phase in the pod status."""
    if is_tombstone:
        return PodPhase.GONE
    state = container.get("state") or {}
    if "terminated" in state:
        return PodPhase.SUCCEEDED if state["terminated"].get("exitCode") == 0 else PodPhase.FAILED
    phase = status.get("phase", "Pending")
    if phase == "Succeeded" or phase == "Failed":
        return PodPhase(phase)
    return PodPhase.RUNNING if "running" in state else PodPhase.PENDING


def _find_container_creating_start(scheduled_condition: RawBody, ready_condition: RawBody) -> datetime | None:
    latest_condition = ready_condition if ready_condition.get("status") == "True" else scheduled_condition
    return _find_true_since(latest_condition)


def _find_true_since(condition: RawBody) -> datetime | None:
    return parse_time(condition.get("lastTransitionTime")) if condition.get("status") == "True" else None


def _find_sidecar_start(status: RawBody, terminated_state: RawBody | None) -> datetime | None:
    """Return the finish time of the trainer container while other containers of the pod are running, otherwise None.

    The pod phase lags about a second behind the container state, so the time is also returned in that second.
    """
    is_finished = status.get("phase") in ("Succeeded", "Failed")
    return None if is_finished or terminated_state is None else parse_time(terminated_state.get("finishedAt"))


def _find_waiting_state(pod: RawBody, container: RawBody) -> WaitingState | None:
    status = pod.get("status") or {}
    init_containers = status.get("initContainerStatuses") or []
    for container_status, image_source in (
        (container, "spec.image"),
        *((init_container, f"the image of {init_container['name']}") for init_container in init_containers),
    ):
        waiting_state = (container_status.get("state") or {}).get("waiting") or {}
        if waiting_state.get("reason") and waiting_state["reason"] not in ("ContainerCreating", "PodInitializing"):
            return WaitingState(waiting_state["reason"], waiting_state.get("message", ""), image_source)
    scheduled_condition = find_condition(status, "PodScheduled")
    if scheduled_condition.get("status") == "False":
        reason, message = scheduled_condition.get("reason", "Unschedulable"), scheduled_condition.get("message", "")
        return WaitingState(reason, message, gates=_read_gates(pod) if reason == GATED else ())
    return None


def _read_gates(pod: RawBody) -> tuple[str, ...]:
    gates = (pod.get("spec") or {}).get("schedulingGates") or ()
    return tuple(str(gate.get("name") or "") for gate in gates)
