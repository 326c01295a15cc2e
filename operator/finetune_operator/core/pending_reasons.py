"""Finds the reason why the pods of an attempt do not run yet, for `status.waiting`.

This module defines the reasons Unschedulable, ImagePullFailed, ConfigMissing, CreateContainerError, VolumesNotReady
and CreateRefused. failures.create_rejections fails a job whose children can never be created.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.scheduling import SchedulingProvider
from finetune_api.v1alpha1.status import WaitStatus
from finetune_operator import names
from finetune_operator.core.provider_choice import choose_provider
from finetune_operator.failures.container_start_rules import CONFIG_ERROR, container_create_failed
from finetune_operator.failures.create_rejections import describe_name_conflict
from finetune_operator.failures.verdict import Verdict, describe_node
from finetune_operator.observation.pods import NodeObservation, Observation, PodPhase, RejectedCreate, WaitingState
from finetune_operator.observation.workload import GATED, WorkloadObservation

IMAGE_PULL_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
)
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(: ErrImagePull)?(: )?')
_REGISTRY_UNAVAILABLE = re.compile(
    r"(error|status:?) 429|429 Too Many|toomanyrequests|50[0234] (Internal|Bad|Service|Gateway)|\(50[0234]\)"
    r"|i/o timeout|handshake timeout|deadline exceeded|Client\.Timeout|connection (refused|reset|timed out)"
    r"|network is unreachable|no route to host|\bEOF\b|server misbehaving|temporary failure in name",
    re.IGNORECASE,
)
_KUBERNETES_NODE_FAULT = re.compile(
    r"no space left on device|failed to (extract|register) layer|failed to unpack image|input/output error"
    r"|read-only file system"
)
_FITS = "Schedulable"  # Volcano's reason of a pod for which there is room, while there is none for another of its group
_REJECTED_WITH_GROUP = re.compile(
    r"optimistic rejection in PostFilter|rejection in Unreserve"  # Coscheduling
    r"|waiting for minCount pods from a gang to be scheduled"  # PodGroup of Kubernetes 1.36
)
_INCOMPLETE_GANG = re.compile(  # the message of a PodGroup of Kubernetes 1.37, on the pods for which there is room
    r"(?:\b0/(?P<placements>\d{1,9}) placements are available.{0,60}?)?"
    r"minCount \((?P<min>\d{1,9})\) cannot be satisfied: (?P<placed>\d{1,9}) scheduled"
)
_RETRIED = "is pulled again until the registry is reachable"
REJECTED_REASONS = frozenset({Reason.PREDECESSOR_TERMINATING, Reason.NAME_TAKEN, Reason.CREATE_REFUSED})
CONTAINER_CREATING_TIMEOUT = timedelta(seconds=60)  # after this time, ContainerCreating is reported
IMAGE_PULL_TIMEOUT = timedelta(minutes=10)
CREATE_CONTAINER_TIMEOUT = timedelta(minutes=3)  # how long the kubelet may retry after CreateContainerError


@dataclass(frozen=True)
class PendingReason:
    """Reason why the pods of an attempt do not run yet.

    `is_image_pull_error`: the image cannot be pulled; the reason times out after IMAGE_PULL_TIMEOUT.
    `permanent`: no retry of the image pull can succeed, so the reason times out at once.
    `expected`: no action is needed, for example during an image pull.
    `verdict`: the verdict on the attempt if the reason times out.
    """

    reason: str
    message: str
    is_image_pull_error: bool = False
    permanent: bool = False
    expected: bool = False
    verdict: Verdict | None = None

    @property
    def timeout(self) -> timedelta | None:
        """Maximum duration of the reason, independent of the deadlines in the spec; None means no limit."""
        if self.is_image_pull_error:
            return timedelta() if self.permanent else IMAGE_PULL_TIMEOUT
        return CREATE_CONTAINER_TIMEOUT if self.verdict else None

    @property
    def has_no_timeout(self) -> bool:
        """Whether the reason may last indefinitely, so that running nodes have to be released."""
        return not self.is_image_pull_error and not self.expected


def find_pending_reason(
    job: FineTuneJob, observation: Observation, nodes: Sequence[NodeObservation], now: datetime
) -> PendingReason | None:
    """Find the most relevant reason why not all pods run; None if no reason is known."""
    if observation.rejected_creates:
        return _explain_rejected_create(observation.rejected_creates[0])
    if predecessors := [node.pod_name for node in observation.predecessor_nodes if node.may_run(now)]:
        message = f"pod {predecessors[0]} of a deleted job of the same name still runs; waiting until it has ended"
        return PendingReason(Reason.PREDECESSOR_TERMINATING, message)
    if job.spec.scheduling is not None and observation.group_apis is not None and job.status.scheduling is None:
        explanation = choose_provider(job.spec, observation.group_apis)
        return PendingReason(Reason.NO_GROUP_SCHEDULER, explanation) if isinstance(explanation, str) else None
    blocked_nodes = [(node, node.waiting) for node in nodes if node.phase is PodPhase.PENDING and node.waiting]
    if not blocked_nodes:
        return _explain_container_creating(nodes, now)
    queue_name = _find_kueue_queue(job)
    if queue_name is not None and any(_is_held_by_queue(waiting) for _, waiting in blocked_nodes):
        return _explain_queue(queue_name, observation.workload)
    return _explain_blocked_nodes(job, blocked_nodes)


def _explain_blocked_nodes(
    job: FineTuneJob, blocked_nodes: Sequence[tuple[NodeObservation, WaitingState]]
) -> PendingReason:
    """Return the most relevant reason of pods that are not scheduled or whose containers do not start."""
    gang = next((gang for _, waiting in blocked_nodes if (gang := _INCOMPLETE_GANG.search(waiting.message))), None)
    blocked_nodes = [item for item in blocked_nodes if not _waits_for_its_group(item[1])] or blocked_nodes
    num_blocked = max(1, job.num_attempt_nodes - int(gang["placed"])) if gang else len(blocked_nodes)
    blocked_pods = f"{num_blocked} of {job.num_attempt_nodes} pods"
    avoided_nodes = ", ".join(job.status.attempts[-1].avoids) if job.status.attempts else ""
    avoidance = f"; this job avoids {avoided_nodes}, where it failed before" if avoided_nodes else ""
    restrictions = f"{_describe_placements(gang)}{avoidance}"
    reasons = [
        _explain_image_pull(node, waiting, job.status.waiting)
        if waiting.reason in IMAGE_PULL_REASONS
        else _explain_waiting_state(node, waiting, blocked_pods, restrictions)
        for node, waiting in blocked_nodes
    ]
    return max(
        reasons, key=lambda item: (item.permanent, item.is_image_pull_error, item.reason != Reason.UNSCHEDULABLE)
    )


def _find_kueue_queue(job: FineTuneJob) -> str | None:
    """Return the LocalQueue of a job whose provider is Kueue."""
    scheduling = job.status.scheduling
    return scheduling.queue_name if scheduling and scheduling.provider == SchedulingProvider.KUEUE else None


def _is_held_by_queue(waiting: WaitingState) -> bool:
    """Return whether Kueue has not admitted the pod, rather than that only gates of other controllers are left."""
    is_gated_by_kueue = any(gate.startswith(names.KUEUE_PREFIX) for gate in waiting.gates)
    return waiting.reason == GATED and (is_gated_by_kueue or not waiting.gates)


def _explain_queue(queue_name: str, workload: WorkloadObservation | None) -> PendingReason:
    """Return the pending reason of pods that Kueue has not admitted."""
    if workload is None:
        message = f"Kueue has not created a Workload for LocalQueue {queue_name} yet"
    elif not workload.is_active:
        message = f"the Workload in LocalQueue {queue_name} is deactivated; set its spec.active to true"
    else:
        position = "" if workload.position is None else f"number {workload.position + 1} in "
        requeue = f"; Kueue considers it again at {workload.requeue_at}" if workload.requeue_at else ""
        explanation = workload.message or "Kueue has not considered the job yet"
        message = f"{position}LocalQueue {queue_name}: {explanation}{requeue}"
    return PendingReason(Reason.WAITING_IN_QUEUE, message)


def _explain_rejected_create(rejected_create: RejectedCreate) -> PendingReason:
    if rejected_create.predecessor_terminating:
        return PendingReason(Reason.PREDECESSOR_TERMINATING, f"{rejected_create.message}; waiting until it is deleted")
    if rejected_create.name_taken:
        return PendingReason(
            Reason.NAME_TAKEN, f"{describe_name_conflict(rejected_create)}; the job continues once it is deleted"
        )
    message = f"{rejected_create.kind} {rejected_create.name}: {rejected_create.message}"
    return PendingReason(Reason.CREATE_REFUSED, message)


def _explain_waiting_state(
    node: NodeObservation, waiting_state: WaitingState, blocked_pods: str, restrictions: str
) -> PendingReason:
    """Return the pending reason of an unscheduled pod or of a container in a waiting state."""
    verdict = container_create_failed(
        node.evidence.model_copy(update={"reason": waiting_state.reason, "message": waiting_state.message})
    )
    if verdict is not None:
        message = f"{node.pod_name} on {node.k8s_node}: {waiting_state.message}; its kubelet retries"
        return PendingReason(Reason.CREATE_CONTAINER_ERROR, message, verdict=verdict)
    if waiting_state.reason == CONFIG_ERROR:
        return PendingReason(
            Reason.CONFIG_MISSING,
            f"{node.pod_name}: {waiting_state.message}; create what is missing and the pod starts",
        )
    if waiting_state.reason in (Reason.UNSCHEDULABLE, _FITS):
        message = f"{blocked_pods} cannot be placed: {_describe_gang(waiting_state.message)}{restrictions}"
        return PendingReason(Reason.UNSCHEDULABLE, message)
    if waiting_state.gates:
        message = (
            f"{blocked_pods} wait until other controllers remove scheduling gates: {', '.join(waiting_state.gates)}"
        )
        return PendingReason(waiting_state.reason, message)
    return PendingReason(waiting_state.reason, f"{node.pod_name}: {waiting_state.message}")


def _waits_for_its_group(waiting_state: WaitingState) -> bool:
    """Return whether there is room for the pod, so that the reason is shown by another pod of its group."""
    message = waiting_state.message
    return waiting_state.reason == _FITS or any(
        pattern.search(message) is not None for pattern in (_REJECTED_WITH_GROUP, _INCOMPLETE_GANG)
    )


def _describe_gang(message: str) -> str:
    """Return the scheduler's message about a pod, or about its PodGroup if there is room for the pod."""
    if gang := _INCOMPLETE_GANG.search(message):
        return f"the scheduler finds room for {gang['placed']} of {gang['min']} pods, and starts all or none"
    return message


def _describe_placements(gang: re.Match[str] | None) -> str:
    """Return how many topology domains the scheduler tried if it tried several; its message is about the first."""
    count = int(gang["placements"] or 1) if gang else 1
    return f"; none of the {count} topology domains has room for the group" if count > 1 else ""


def _explain_image_pull(
    node: NodeObservation, waiting_state: WaitingState, wait_status: WaitStatus | None
) -> PendingReason:
    """Return the pending reason of a failing image pull; registry outages are retried without limit.

    Between two pulls the kubelet reports ImagePullBackOff without a cause; the last known cause is kept meanwhile.
    """
    cause = _BACK_OFF.sub("", waiting_state.message)
    known_message = ""
    if wait_status is not None and wait_status.reason == Reason.IMAGE_PULL_FAILED and not cause:
        known_message = wait_status.message
    location = f"{node.pod_name} on {node.k8s_node}"
    if _KUBERNETES_NODE_FAULT.search(cause or known_message):
        verdict = Verdict(
            Reason.CONTAINER_RUNTIME_ERROR,
            f"{describe_node(node.evidence)}: {cause or known_message}",
            evidence=node.evidence,
        )
        message = known_message or f"{location}: {cause}; its kubelet retries"
        return PendingReason(Reason.IMAGE_PULL_FAILED, message, verdict=verdict)
    if known_message:
        message = known_message
    elif _REGISTRY_UNAVAILABLE.search(cause):
        message = f"{location}: {cause}; {waiting_state.image_source} {_RETRIED}"
    else:
        check = f"check {waiting_state.image_source} and spec.imagePullSecrets"
        message = f"{node.pod_name}: {cause or waiting_state.reason}; {check}"
    return PendingReason(
        Reason.IMAGE_PULL_FAILED,
        message,
        is_image_pull_error=not message.endswith(_RETRIED),
        permanent=waiting_state.reason == "InvalidImageName",
    )


def _explain_container_creating(nodes: Sequence[NodeObservation], now: datetime) -> PendingReason | None:
    """Return the pending reason of containers that stay in the state ContainerCreating, which has no message."""
    durations = ((node, node.get_container_creating_duration(now) or timedelta()) for node in nodes)
    slow_nodes = [node for node, duration in durations if duration >= CONTAINER_CREATING_TIMEOUT]
    for node in sorted(slow_nodes, key=lambda node: node.ready_to_start is not False):
        location, hint = f"{node.pod_name} on {node.k8s_node}", f"see kubectl describe pod {node.pod_name}"
        if node.ready_to_start is False:
            return PendingReason(Reason.VOLUMES_NOT_READY, f"{location}: its volumes or network are not ready; {hint}")
        return PendingReason(
            Reason.CONTAINER_CREATING,
            f"{location}: its image is being pulled, or an init container runs; {hint}",
            expected=True,
        )
    return None
