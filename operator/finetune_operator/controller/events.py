"""Builds Kubernetes events about a job."""

import hashlib
from datetime import datetime

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_operator import names
from finetune_operator.core.actions import EmitEvent
from finetune_operator.observation.ownership import RawBody


def build_event(job: ObjectMeta, event_action: EmitEvent, now: datetime) -> RawBody:
    """Build an Event about the job, with a hash of the key in its name, so that the API server rejects duplicates."""
    digest = hashlib.sha256(f"{job.uid}/{event_action.key}".encode()).hexdigest()[:16]
    timestamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": event_action.type,
        "reason": event_action.reason,
        "message": event_action.message[:1024],
        "source": {"component": names.MANAGER},
        "reportingComponent": names.MANAGER,
        "firstTimestamp": timestamp,
        "lastTimestamp": timestamp,
        "count": 1,
    }
