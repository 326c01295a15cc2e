"""Builds CloudEvents 1.0 in structured JSON mode, https://github.com/cloudevents/spec."""

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime

from finetune_api.bounded_text import truncate_text
from finetune_api.v1alpha1.job import ObjectMeta
from finetune_operator import names
from finetune_operator.core.transitions import Transition

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
MAX_MESSAGE_BYTES = 1024
TYPE_PREFIX = "dev.finetune.job."  # reverse DNS name of the API group and the resource


def build_event_id(job: ObjectMeta, transition: Transition) -> str:
    """Return the id of the event, which is the same for each delivery, also by another operator process."""
    return f"{job.uid}/{transition.key}"


def build_cloud_event(job: ObjectMeta, transition: Transition, *, source: str) -> bytes:
    """Return the event as JSON of at most about 3 KiB. The same transition always has the same content."""
    data = {
        "namespace": job.namespace,
        "name": job.name,
        "uid": job.uid,
        "attempt": transition.attempt,
        "reason": transition.reason,
        "fault": transition.fault,
        "message": truncate_text(transition.message, MAX_MESSAGE_BYTES),
        "nodeRank": transition.node_rank,
        "rank": transition.rank,
        "kubernetesNode": transition.k8s_node,
    }
    group, version, plural = names.FINETUNEJOB
    event = {
        "specversion": "1.0",
        "id": build_event_id(job, transition),
        "source": source,
        "subject": f"/apis/{group}/{version}/namespaces/{job.namespace}/{plural}/{job.name}",
        "type": f"{TYPE_PREFIX}{transition.type}",
        "time": transition.time.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": {name: value for name, value in data.items() if value not in (None, "")},
    }
    return json.dumps(event, ensure_ascii=False).encode(errors="replace")


def sign_event(event_id: str, body: bytes, *, key: bytes, now: datetime) -> dict[str, str]:
    """Return the headers of https://www.standardwebhooks.com: the HMAC-SHA256 of id, time in seconds and body."""
    timestamp = str(int(now.timestamp()))
    signed = b".".join((event_id.encode(), timestamp.encode(), body))
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {"webhook-id": event_id, "webhook-timestamp": timestamp, "webhook-signature": f"v1,{signature}"}
