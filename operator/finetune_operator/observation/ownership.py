"""Finds the job that owns a child object, from its owner reference and labels."""

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from finetune_api.untrusted_json import drop_invalid_time
from finetune_api.v1alpha1.job import MAX_JOB_NAME
from finetune_api.v1alpha1.name_types import JOB_NAME_PATTERN
from finetune_operator import names

RawBody = dict[str, Any]  # a Kubernetes object as the API server sends it

_JOB_NAME, _UID = re.compile(JOB_NAME_PATTERN), re.compile(r"[a-z0-9][-a-z0-9]{0,62}")


class JobOwner(NamedTuple):
    """Identity of a job within its namespace."""

    name: str
    uid: str


def find_controlling_owner(child: RawBody) -> RawBody:
    """Return the owner reference with `controller: true`, or an empty dict."""
    owners: Iterable[RawBody] = child["metadata"].get("ownerReferences") or ()
    for owner in owners:  # without a generator expression, because each pass does this for all pods
        if owner.get("controller"):
            return owner
    return {}


def get_controller_uid(child: RawBody) -> str | None:
    """Return the uid of the controlling owner."""
    return find_controlling_owner(child).get("uid")


def find_owning_job(child: RawBody) -> JobOwner | None:
    """Return the job that controls a child; None if its controller is not a job, or has an invalid name or uid.

    Whoever creates an object writes its owner references: Kubernetes requires only that their fields are not empty.
    """
    owner = find_controlling_owner(child)
    name, uid = owner.get("name", ""), owner.get("uid") or ""
    is_job = _is_job_reference(owner) and len(name) <= MAX_JOB_NAME
    return JobOwner(name, uid) if is_job and _JOB_NAME.fullmatch(name) and _UID.fullmatch(uid) else None


def select_children(job: JobOwner, bodies: Iterable[RawBody]) -> list[RawBody]:
    """Return the objects that the job controls."""
    return [body for body in bodies if is_controlled(body, job)]


def is_controlled(child: RawBody, job: JobOwner) -> bool:
    """Return whether an existing job controls a child, by group, kind, name and uid."""
    owner = find_controlling_owner(child)
    return owner.get("uid") == job.uid and owner.get("name") == job.name and _is_job_reference(owner)


def _is_job_reference(owner: RawBody) -> bool:
    return get_group_kind_name(owner)[:2] == (names.FINETUNEJOB[0], names.FINETUNEJOB_KIND)


def get_group_kind_name(owner: RawBody) -> tuple[str, str, str]:
    """Return the API group, kind and name, which identify an existing object within its namespace."""
    return owner.get("apiVersion", "").rpartition("/")[0], owner.get("kind", ""), owner.get("name", "")


def has_job_label(child: RawBody) -> bool:
    """Return whether the job-uid label, which informers select by, contains the uid of the controlling job."""
    labels = child["metadata"].get("labels") or {}
    return bool(labels.get(names.JOB_UID) == get_controller_uid(child))


def get_start_key(pod: RawBody) -> str:
    """Return the start key of a pod; empty if it has none."""
    return str((pod["metadata"].get("annotations") or {}).get(names.START_KEY, ""))


def parse_time(text: str | None) -> datetime | None:
    """Parse a timestamp of the Kubernetes API; return None if it is missing, empty or out of range."""
    return drop_invalid_time(datetime.fromisoformat(text)) if text else None
