"""Finds the job that owns a child object, from its owner reference and labels."""

from datetime import datetime
from typing import Any

from finetune_api.untrusted_json import drop_invalid_time
from finetune_operator import names

RawBody = dict[str, Any]  # a Kubernetes object as the API server sends it


def find_controlling_owner(child: RawBody) -> RawBody:
    """Return the owner reference with `controller: true`, or an empty dict."""
    owners = child["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def get_controller_uid(child: RawBody) -> str | None:
    """Return the uid of the controlling owner."""
    return find_controlling_owner(child).get("uid")


def get_group_kind_name(owner: RawBody) -> tuple[str, str, str]:
    """Return the API group, kind and name, which identify an existing object within its namespace."""
    return owner.get("apiVersion", "").partition("/")[0], owner.get("kind", ""), owner.get("name", "")


def has_job_label(child: RawBody) -> bool:
    """Return whether the job-uid label, which informers select by, contains the uid of the controlling job."""
    labels = child["metadata"].get("labels") or {}
    return bool(labels.get(names.JOB_UID) == get_controller_uid(child))


def parse_time(text: str | None) -> datetime | None:
    """Parse a timestamp of the Kubernetes API; return None if it is missing, empty or out of range."""
    return drop_invalid_time(datetime.fromisoformat(text)) if text else None
