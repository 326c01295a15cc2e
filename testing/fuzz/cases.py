"""Random inputs of one reconcile pass, each of which is determined by its seed."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from crd import build_crd
from finetune_api.termination import Termination
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator import names
from finetune_operator.controller.progress_poller import StatusBody
from testing.builders.jobs import UID, finished_pod, job, pod, running_pod, spec, terminating_pod
from testing.builders.mutations import mutate, mutate_text
from testing.builders.passes import build_raw_job, compute_status_after_observations, running_pods
from testing.fuzz.pod_schema import METADATA, STATUS
from testing.fuzz.schema_values import Schema, generate_value

RawBody = dict[str, Any]

MAX_CHANGES = 6
PROGRESS: RawBody = {
    "step": 7,
    "totalSteps": 90,
    "loss": 1.5,
    "memory": {"peakHighest": 5},
    "updateTime": "2026-01-01T12:00:00Z",
}
MESSAGE: RawBody = {
    "version": 1, "nodeRank": 1, "attempt": 0, "final": True, "outcome": "failed", "phase": "train", "rank": 3,
    "localRank": 1, "errorType": "RuntimeError", "message": "CUDA error: out of memory", "stack": "File", "exitCode": 1,
    "signal": 9, "victim": False, "time": 1767268800.5, "firstStep": 2, "peakMemoryBytes": 7, "progress": PROGRESS,
}  # fmt: skip
RESPONSE: RawBody = {"uid": UID, "attempt": 0, "namespace": "default", "job": "bert", "progress": PROGRESS}
STATUSES = (
    JobStatus(),
    compute_status_after_observations(),
    compute_status_after_observations(running_pods()),
    compute_status_after_observations(running_pods(), (running_pod(job(), 0), finished_pod(job(), 1))),
)


@dataclass(frozen=True)
class PassCase:
    """Objects in the order in which the watches deliver them; `response` is the body of a /status response."""

    kind: str
    job: RawBody
    pods: tuple[RawBody, ...]
    deleted_pods: tuple[RawBody, ...] = field(default=())
    response: str = ""


def build_case(seed: int) -> PassCase:
    """Return the case of this seed; its kind is one of CASE_BUILDERS."""
    source = random.Random(seed)
    kind = source.choice(tuple(CASE_BUILDERS))
    return CASE_BUILDERS[kind](kind, source)


def _build_changed_pods(kind: str, source: random.Random) -> PassCase:
    pods = tuple(_change_pod(body, source) for body in build_pods(source))
    deleted_pods = tuple(_change_pod(body, source) for body in build_pods(source)[: source.randrange(3)])
    return PassCase(kind, build_raw_job(source.choice(STATUSES)), pods, deleted_pods, build_response(source))


def _build_generated_pods(kind: str, source: random.Random) -> PassCase:
    pods = tuple(_generate_pod(body, source) for body in build_pods(source))
    deleted_pods = tuple(_generate_pod(body, source) for body in build_pods(source)[: source.randrange(3)])
    body = build_raw_job(source.choice(STATUSES), suspend=source.random() < 0.2)
    return PassCase(kind, body, pods, deleted_pods, build_response(source))


def _build_changed_job(kind: str, source: random.Random) -> PassCase:
    """Change spec and status; with values of other types, a status is mostly ignored as unreadable."""
    body = build_raw_job(source.choice(STATUSES), suspend=source.random() < 0.3, activeDeadlineSeconds=50)
    keep_types = source.random() < 0.7
    changed = {
        name: mutate(body[name], source, count=source.randrange(MAX_CHANGES), keep_types=keep_types)
        for name in source.sample(("spec", "status"), source.choice((1, 1, 2)))
    }
    return PassCase(kind, {**body, **changed}, build_pods(source))


def _build_generated_job(kind: str, source: random.Random) -> PassCase:
    """Replace a few fields of a valid spec and of a status by values from the schema of the CRD."""
    schema = load_job_schema()["properties"]
    body = build_raw_job(source.choice(STATUSES))
    for part in ("spec", "status"):
        fields = schema[part]["properties"]
        for name in source.sample(sorted(fields), source.randrange(4)):
            body.setdefault(part, {})[name] = generate_value(fields[name], source)
    return PassCase(kind, body, build_pods(source), response=build_response(source))


CASE_BUILDERS: dict[str, Callable[[str, random.Random], PassCase]] = {
    "changed pods": _build_changed_pods,
    "generated pods": _build_generated_pods,
    "changed job": _build_changed_job,
    "generated job": _build_generated_job,
}


@cache
def load_job_schema() -> Schema:
    """Return the schema that the API server checks jobs with."""
    schema: Schema = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert spec().keys() <= schema["properties"]["spec"]["properties"].keys()
    return schema


@cache
def _load_message_schemas() -> dict[str, Schema]:
    return {
        "message": TypeAdapter(Termination).json_schema(by_alias=True),
        "response": TypeAdapter(StatusBody).json_schema(by_alias=True),
    }


def build_message(source: random.Random) -> str:
    """Return a termination message that a node or a user's program may have written."""
    return _build_text(MESSAGE, "message", source)


def build_response(source: random.Random) -> str:
    """Return the body of a /status response of a pod."""
    return _build_text(RESPONSE, "response", source)


def _build_text(example: RawBody, schema_name: str, source: random.Random) -> str:
    if source.random() < 0.5:
        return mutate_text(json.dumps(example), source, count=source.randrange(MAX_CHANGES))
    generated = {**example, **generate_value(_load_message_schemas()[schema_name], source)}
    if source.random() < 0.7:  # a response with another uid or attempt is ignored
        generated |= {name: example[name] for name in ("uid", "attempt") if name in example}
    return mutate_text(json.dumps(generated), source, count=source.randrange(3))


def build_pods(source: random.Random) -> tuple[RawBody, ...]:
    """Return the pods of both nodes in random states; those that have ended contain a termination message."""
    return tuple(_build_pod(node_rank, source) for node_rank in (0, 1))


def _build_pod(node_rank: int, source: random.Random) -> RawBody:
    owner, state = job(), source.randrange(5)
    time = "2026-01-01T12:00:00Z"
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": time}
    disrupted = {
        "type": "DisruptionTarget",
        "reason": "EvictionByEvictionAPI",
        "message": "m",
        "lastTransitionTime": time,
        "status": source.choice(("True", "False")),
    }
    if state == 0:
        return pod(owner, node_rank, conditions=[scheduled, disrupted])
    if state == 1:
        body = running_pod(owner, node_rank)
    else:
        body = finished_pod(
            owner, node_rank, exit_code=source.choice((0, 1, 137)), message=build_message(source),
            finishedAt="2026-01-01T12:00:30Z", startedAt=time,
        )  # fmt: skip
    body["status"]["conditions"] = [disrupted]
    return terminating_pod(body) if state == 4 else body


def _change_pod(body: RawBody, source: random.Random) -> RawBody:
    """Return the pod with changed spec and status; the API server guarantees the types."""
    changed = {
        name: mutate(body[name], source, count=source.randrange(MAX_CHANGES), keep_types=True)
        for name in ("spec", "status")
    }
    return {**body, **changed}


def _generate_pod(body: RawBody, source: random.Random) -> RawBody:
    """Return the pod with a status from the schema, half of them also with such metadata."""
    status = generate_value(STATUS, source)
    for statuses in (status.get("containerStatuses", ()), status.get("initContainerStatuses", ())):
        for container in statuses:
            terminated = container.get("state", {}).get("terminated")
            if terminated is not None and source.random() < 0.7:
                terminated["message"] = build_message(source)
    if source.random() < 0.5:
        return {**body, "status": status}
    generated = generate_value(METADATA, source)
    labels = {
        **generated.get("labels", {}),
        names.JOB_UID: UID,
        names.ATTEMPT: source.choice(("0", "1", "x", "\u0663")),
    }
    owners = [*generated.get("ownerReferences", ()), *body["metadata"]["ownerReferences"]]
    return {
        **body,
        "metadata": {**body["metadata"], **generated, "labels": labels, "ownerReferences": owners},
        "status": status,
    }
