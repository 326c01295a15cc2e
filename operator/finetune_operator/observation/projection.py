"""Reduces objects on arrival to the fields that the operator reads, because whole pods need ten times the memory."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from finetune_operator import names
from finetune_operator.observation.ownership import RawBody, find_controlling_owner, get_start_key

IDENTITY_FIELDS = ("name", "namespace", "uid", "resourceVersion")
POD_METADATA_FIELDS = (*IDENTITY_FIELDS, "deletionTimestamp", "deletionGracePeriodSeconds")
JOB_METADATA_FIELDS = (*IDENTITY_FIELDS, "deletionTimestamp", "generation", "creationTimestamp")
POD_LABELS = (names.JOB_UID, names.ATTEMPT, names.KUEUE_MANAGED)
OWNER_FIELDS = ("apiVersion", "kind", "name", "uid", "controller")
STATUS_FIELDS = ("phase", "reason", "message", "podIP")
# Conditions of an unknown type are kept, because they may explain a failure.
UNUSED_CONDITIONS = ("Initialized", "Ready", "ContainersReady")
CONDITION_FIELDS = ("type", "status", "reason", "message", "lastTransitionTime")
STATE_FIELDS = {
    "running": ("startedAt",),
    "waiting": ("reason", "message"),
    "terminated": ("exitCode", "reason", "signal", "message", "finishedAt"),
}
SERVICE_SPEC_FIELDS = ("clusterIP", "publishNotReadyAddresses", "selector")
MAX_SHARED_CHARACTERS = 63


def project_pod(pod: RawBody) -> RawBody:
    """Return the pod with the fields that observation, ownership, tombstones and the progress poller read."""
    status = _pick(pod.get("status"), STATUS_FIELDS)
    for field, project in _STATUS_PROJECTIONS.items():
        if field in (pod.get("status") or ()):
            status[field] = project(pod["status"][field])
    spec = _pick(pod.get("spec"), ("nodeName", "hostNetwork", "schedulingGates", "schedulingGroup"))
    trainer = _find_trainer((pod.get("spec") or {}).get("containers"))
    if trainer is not None:
        fields = ("name", "image", "ports") if spec.get("hostNetwork") else ("name", "image")
        spec["containers"] = [_pick(trainer, fields)]
    return {"metadata": _project_metadata(pod, POD_METADATA_FIELDS), "spec": spec, "status": status}


def project_ended_pod(pod: RawBody) -> RawBody | None:
    """Return the identity and phase of a pod whose containers have all ended, or None for another pod.

    A finished job needs no more of such a pod, because it neither judges nor deletes it. Kueue may keep the pod after
    the deletion of the job.
    """
    if not has_ended(pod):
        return None
    return {
        "metadata": _project_metadata(pod, (*IDENTITY_FIELDS, "deletionTimestamp")),
        "status": {"phase": pod["status"]["phase"]},
    }


def has_ended(pod: RawBody | None) -> bool:
    """Return whether all containers of a pod have ended, so that it uses no quota; None stands for a deleted pod."""
    return pod is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def project_service(service: RawBody) -> RawBody:
    """Return the Service with the fields that show whether it still serves the pods of its job."""
    spec = _pick(service.get("spec"), SERVICE_SPEC_FIELDS)
    return {"metadata": _project_metadata(service, IDENTITY_FIELDS), "spec": spec}


def project_job(job: RawBody) -> RawBody:
    """Return the job with spec and status, and without labels, annotations and managed fields."""
    return {**job, "metadata": _pick(job["metadata"], JOB_METADATA_FIELDS)}


def _project_metadata(body: RawBody, fields: Iterable[str]) -> RawBody:
    metadata = _pick(body["metadata"], fields)
    metadata["labels"] = _pick(body["metadata"].get("labels"), POD_LABELS)
    if start_key := get_start_key(body)[:MAX_SHARED_CHARACTERS]:
        metadata["annotations"] = {names.START_KEY: _share(start_key)}
    if names.KUEUE_FINALIZER in (body["metadata"].get("finalizers") or ()):
        metadata["finalizers"] = [names.KUEUE_FINALIZER]
    owner = find_controlling_owner(body)
    metadata["ownerReferences"] = [_pick(owner, OWNER_FIELDS)] if owner else []
    return metadata


def _project_conditions(conditions: Any) -> Any:
    used_conditions = (c for c in conditions or () if c.get("type") not in UNUSED_CONDITIONS)
    return [_pick(condition, CONDITION_FIELDS) for condition in used_conditions]


def _project_trainer_status(statuses: Any) -> Any:
    trainer = _find_trainer(statuses)
    return [] if trainer is None else [_project_container_status(trainer)]


def _find_trainer(containers: Any) -> Any:
    return next((container for container in containers or () if container.get("name") == names.CONTAINER), None)


def _project_init_statuses(statuses: Any) -> Any:
    return [_project_container_status(status) for status in statuses or ()]


def _project_container_status(container: RawBody) -> RawBody:
    projected = _pick(container, ("name", "restartCount", "imageID"))
    for field in ("state", "lastState"):
        if state := container.get(field):
            present_kinds = ((kind, fields) for kind, fields in STATE_FIELDS.items() if kind in state)
            projected[field] = {kind: state[kind] and _pick(state[kind], fields) for kind, fields in present_kinds}
    return projected


def _pick(mapping: RawBody | None, fields: Iterable[str]) -> RawBody:
    """Return the present fields. Equal short texts, such as reasons, become one object."""
    source = mapping or {}
    return {field: _share(source[field]) for field in fields if field in source}


def _share(value: Any) -> Any:
    return sys.intern(value) if isinstance(value, str) and len(value) <= MAX_SHARED_CHARACTERS else value


_STATUS_PROJECTIONS: dict[str, Callable[[Any], Any]] = {
    "conditions": _project_conditions,
    "containerStatuses": _project_trainer_status,
    "initContainerStatuses": _project_init_statuses,
}
