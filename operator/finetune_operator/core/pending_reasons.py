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
from finetune_api.v1alpha1.status import WaitStatus
from finetune_operator.failures.container_start_rules import CONFIG_ERROR, container_create_failed
from finetune_operator.failures.create_rejections import describe_name_conflict
from finetune_operator.failures.verdict import Verdict, describe_node
from finetune_operator.observation.pods import NodeObservation, Observation, PodPhase, RejectedCreate, WaitingState

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
    blocked_nodes = [(node, node.waiting) for node in nodes if node.phase is PodPhase.PENDING and node.waiting]
    if not blocked_nodes:
        return _explain_container_creating(nodes, now)
    avoided_nodes = ", ".join(job.status.attempts[-1].avoids) if job.status.attempts else ""
    avoidance = f"; this job avoids {avoided_nodes}, where it failed before" if avoided_nodes else ""
    blocked_pods = f"{len(blocked_nodes)} of {job.num_attempt_nodes} pods"
    reasons = [
        _explain_image_pull(node, waiting, job.status.waiting)
        if waiting.reason in IMAGE_PULL_REASONS
        else _explain_waiting_state(node, waiting, blocked_pods, avoidance)
        for node, waiting in blocked_nodes
    ]
    return max(
        reasons, key=lambda item: (item.permanent, item.is_image_pull_error, item.reason != Reason.UNSCHEDULABLE)
    )


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
    node: NodeObservation, waiting_state: WaitingState, blocked_pods: str, avoidance: str
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
    if waiting_state.reason == Reason.UNSCHEDULABLE:
        message = f"{blocked_pods} cannot be placed: {waiting_state.message}{avoidance}"
        return PendingReason(Reason.UNSCHEDULABLE, message)
    return PendingReason(waiting_state.reason, f"{node.pod_name}: {waiting_state.message}")


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
