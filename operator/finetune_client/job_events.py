"""Events about a job and its pods, oldest first."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from finetune_api.v1alpha1.job import KIND
from finetune_client.job import Job
from finetune_operator import names
from finetune_operator.observation.ownership import RawBody, parse_time

EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class JobEvent:
    """An event of the API group events.k8s.io about a job or one of its pods."""

    time: datetime
    type: str  # Normal or Warning
    reason: str
    message: str
    about: str  # the job, or the name of a pod
    count: int = 1


def select_events(job: Job, bodies: Iterable[RawBody]) -> tuple[JobEvent, ...]:
    """Return the events about the job and the pods of its attempts, sorted by time."""
    events = [_parse_event(body) for body in bodies if _is_about(job, body.get("regarding") or {})]
    return tuple(sorted(events, key=lambda event: event.time))


def _is_about(job: Job, target: dict[str, Any]) -> bool:
    if target.get("kind") == KIND:
        return bool(target.get("uid") == job.metadata.uid)
    return target.get("kind") == "Pod" and names.parse_pod_name(str(target.get("name")), job.name) is not None


def _parse_event(body: RawBody) -> JobEvent:
    series = body.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        body.get("deprecatedLastTimestamp"),
        body.get("eventTime"),
        body["metadata"].get("creationTimestamp"),
    )
    return JobEvent(
        time=next((parsed for text in times if (parsed := parse_time(text)) is not None), EPOCH),
        type=str(body.get("type", "")),
        reason=str(body.get("reason", "")),
        message=str(body.get("note", "")),
        about=str(body["regarding"].get("name", "")),
        count=int(series.get("count") or body.get("deprecatedCount") or 1),
    )
