"""Decides about a job that this release cannot reconcile: only suspend, cancel, the active deadline and the TTL apply.

The spec is read field by field from the raw object, because it may not be parsable (decisions/119). Pods stay as they
are otherwise: another release, or a repaired spec, continues with them.
"""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from finetune_api.v1alpha1.job import GRACE_SECONDS, MAX_GRACE_SECONDS
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Phase
from finetune_operator import names
from finetune_operator.core.actions import Action, DeleteJob, DeletePod, DeleteWorkload, EmitEvent
from finetune_operator.core.conditions import ConditionBuilder, keep_transition_times
from finetune_operator.core.decision import Decision
from finetune_operator.core.gpu_seconds import update_gpu_seconds
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS
from finetune_operator.core.stop_attempt import CANCELLED_MESSAGE
from finetune_operator.observation.ownership import RawBody
from finetune_operator.settings import Settings

RETRY_INTERVAL = timedelta(seconds=60)
MAX_PROBLEM_CHARACTERS = 500
_MAX_SECONDS = 10 * 365 * 86_400  # longer limits count as absent


def decide_degraded(
    job: RawBody,
    status: JobStatus,
    pods: Collection[RawBody],
    now: datetime,
    *,
    problem: str,
    settings: Settings,
) -> Decision:
    """Return the decision with a Stalled condition that states the problem.

    pods: the live pods that the job controls.
    """
    spec, metadata = job.get("spec") or {}, job["metadata"]
    builder, is_command = ConditionBuilder(metadata.get("generation", 0), now), spec.get("command") is not None
    if status.completion_time is not None:
        field = "ttlSecondsAfterFinished"
        ttl = _read_seconds(spec if spec.get(field) is not None else {field: settings.default_ttl_seconds}, field)
        has_expired = settings.delete_finished_jobs and ttl is not None and now >= status.completion_time + ttl
        delete_job = (DeleteJob(metadata["uid"]),) if has_expired else ()
        requeue_after = None if ttl is None else RETRY_INTERVAL
        actions = (*_delete_pods(pods, ABORT_GRACE_SECONDS), *_release_quota(job, pods), *delete_job)
        return Decision(status, actions, requeue_after)
    if spec.get("cancel") is True:
        actions = _delete_pods(pods, _read_grace_seconds(spec))
        return _fail(status, actions, builder, Reason.CANCELLED, CANCELLED_MESSAGE, is_command=is_command)
    deadline = _read_seconds(spec, "activeDeadlineSeconds")
    suspended = timedelta(seconds=status.suspended_seconds)
    if deadline is not None and status.start_time is not None and now >= status.start_time + deadline + suspended:
        actions = _delete_pods(pods, _read_grace_seconds(spec))
        message = f"active for longer than activeDeadlineSeconds ({deadline.total_seconds():.0f} s)"
        reason = Reason.DEADLINE_EXCEEDED
        return _fail(status, actions, builder, reason, message, is_command=is_command)
    message = (
        f"the operator cannot reconcile this job: {problem[:MAX_PROBLEM_CHARACTERS]}; until it can, only suspend,"
        " cancel, activeDeadlineSeconds, ttlSecondsAfterFinished and deletion apply"
    )
    stalled = builder.build("Stalled", True, Reason.RECONCILE_FAILED, message)
    conditions = [c for c in status.conditions if c.type != stalled.type]
    update = {"conditions": keep_transition_times((*conditions, stalled), status.conditions)}
    is_suspended = spec.get("suspend") is True
    actions = (*_delete_pods(pods, _read_grace_seconds(spec)), *_release_quota(job, pods)) if is_suspended else ()
    return Decision(status.model_copy(update=update), actions, requeue_after=RETRY_INTERVAL)


def _fail(
    status: JobStatus,
    actions: tuple[Action, ...],
    builder: ConditionBuilder,
    reason: Reason,
    message: str,
    *,
    is_command: bool,
) -> Decision:
    """Fail the job and its current attempt at the time of the builder."""
    now = builder.now
    update: dict[str, object] = {
        "phase": Phase.FAILED,
        "completion_time": now,
        "conditions": keep_transition_times(builder.build_failed(reason, message), status.conditions),
    }
    if status.attempts:
        ended = {
            "state": AttemptState.FAILED,
            "end_time": now,
            "reason": reason,
            "fault": reason.fault,
            "message": message,
        }
        update["attempts"] = (*status.attempts[:-1], status.attempts[-1].model_copy(update=ended))
    event = EmitEvent("Warning", reason, message, "end")
    failed_status = status.model_copy(update=update)
    return Decision(update_gpu_seconds(status, failed_status, now, is_command=is_command), (*actions, event))


def _delete_pods(pods: Iterable[RawBody], grace_seconds: int) -> tuple[Action, ...]:
    return tuple(
        DeletePod(pod["metadata"]["name"], pod["metadata"]["uid"], grace_seconds)
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp")
        and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    )


def _release_quota(job: RawBody, pods: Collection[RawBody]) -> tuple[Action, ...]:
    """Return the deletion of Kueue's Workload once all pods have ended, if one of them still holds quota."""
    is_held = any(names.KUEUE_FINALIZER in (pod["metadata"].get("finalizers") or ()) for pod in pods)
    if not is_held or not all(map(_has_ended, pods)):
        return ()
    metadata = job["metadata"]
    return (DeleteWorkload(names.workload_name(metadata["name"], metadata["uid"])),)


def _has_ended(pod: RawBody) -> bool:
    """Return whether the pod has ended, or was deleted before it was assigned to a Kubernetes node."""
    is_scheduled = bool((pod.get("spec") or {}).get("nodeName"))
    has_ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return has_ended or (not is_scheduled and bool(pod["metadata"].get("deletionTimestamp")))


def _read_grace_seconds(spec: RawBody) -> int:
    grace_period = _read_seconds(spec, "terminationGracePeriodSeconds")
    if grace_period is None or not ABORT_GRACE_SECONDS <= grace_period.total_seconds() <= MAX_GRACE_SECONDS:
        return GRACE_SECONDS
    return int(grace_period.total_seconds())


def _read_seconds(spec: RawBody, field: str) -> timedelta | None:
    value = spec.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_SECONDS:
        return None
    return timedelta(seconds=value)
