"""Prepares the pod group of Kueue for the pods of the next attempt, which replace those of the last one.

A replaced pod passes on its quota. Kueue replaces only pods that failed or were never scheduled, and only by equal
pods; it deletes others in excess of the size of the group.
"""

from collections.abc import Iterable
from datetime import datetime

from finetune_api.v1alpha1.reasons import FailureAction
from finetune_operator.core.actions import Action
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS, SIDECAR_TIMEOUT, JobContext
from finetune_operator.observation.pods import NodeObservation, PodPhase


def prepare_queue_group(context: JobContext, older_pods: Iterable[NodeObservation]) -> tuple[Action, ...] | None:
    """Return the actions that have to take effect before pods are created in the group; None if Kueue accepts them.

    older_pods: the pods of earlier attempts, of which no process runs.
    """
    managed = [node for node in older_pods if node.is_managed_by_kueue]
    # wait for the phase of a pod, which follows the end of its container by a second, and end its sidecars
    if ending := [node for node in managed if _is_ending(node, context.now)]:
        return context.build_deletions(ending, ABORT_GRACE_SECONDS)
    # leave the group if a pod succeeded, is on a lost Kubernetes node, or will be replaced by a different one
    leaves_group = not all(map(_is_replaceable, managed)) or _differs_from_last_attempt(context)
    return (context.release_quota() or None) if leaves_group else None


def _is_replaceable(node: NodeObservation) -> bool:
    """Return whether Kueue replaces the pod: it failed, or was deleted before it was assigned to a Kubernetes node.

    Source: Kueue 0.19.2, pkg/controller/jobs/pod, isPodRunnableOrSucceeded
    """
    return node.phase is PodPhase.FAILED or (node.is_terminating and not node.is_scheduled)


def _is_ending(node: NodeObservation, now: datetime) -> bool:
    """Return whether the trainer has ended, but the phase of its pod has not been reported yet."""
    if node.sidecar_running_since is None:
        return False
    return node.deletion_deadline is None or now < node.deletion_deadline + SIDECAR_TIMEOUT


def _differs_from_last_attempt(context: JobContext) -> bool:
    """Return whether the pods may have other requests, another affinity or another number than the last ones.

    The Workload of a suspended job is being deleted, and Kueue stops pods that join it before it is gone.
    """
    *_, last, current = (None, *context.status.attempts)
    if last is None:
        return False
    return last.action in (FailureAction.REPAIR, "Suspend") or last.avoids != current.avoids
