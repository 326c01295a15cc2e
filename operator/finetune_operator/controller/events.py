"""Builds Kubernetes events about a job."""

import hashlib
import os
from datetime import UTC, datetime

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_api.visible_text import escape_controls
from finetune_operator import names
from finetune_operator.core.actions import EmitEvent
from finetune_operator.observation.ownership import RawBody

MAX_NOTE_BYTES = 1024  # limit of the API server, as the next one
MAX_INSTANCE_LENGTH = 128


def build_event(job: ObjectMeta, event_action: EmitEvent, now: datetime) -> RawBody:
    """Build an Event about the job, with a hash of the key in its name, so that the API server rejects duplicates.

    Events have no series, because each key is one transition of one attempt. The status records the transition before
    the event is created, so that no pass repeats it, even when the API server has deleted the event after an hour.
    """
    digest = hashlib.sha256(f"{job.uid}/{event_action.key}".encode()).hexdigest()[:16]
    transition, _, _ = event_action.key.partition("-")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "eventTime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"{names.FINETUNEJOB[0]}/{names.MANAGER}",
        "reportingInstance": os.uname().nodename[:MAX_INSTANCE_LENGTH],
        "action": transition.capitalize(),
        "type": event_action.type,
        "reason": event_action.reason,
        "note": escape_controls(event_action.message).encode()[:MAX_NOTE_BYTES].decode(errors="ignore"),
        "regarding": {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
    }
