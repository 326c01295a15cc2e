"""Renders the requests of the floor: the objects and status writes that a job needs at least.

The requests are rendered before the measurement. A job's status is written when its attempt starts, when all its pods
run, when a failure stops the attempt, when the next attempt starts and when the pods of that run. The first, third and
fourth write keep the operator from repeating or losing a step after a crash.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.load.job_bodies import KILLED_RANK_TERMINATION, RawBody, build_job_body
from benchmarks.rig import NAMESPACE
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator import names
from finetune_operator.controller.reconcile import render_status
from finetune_operator.kube.api_paths import collection_path, object_path
from finetune_operator.observation.pods import Observation
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import SETTINGS, UID, build_observation, decide_once, finished_pod, running_pod

MAX_PASSES = 5


class PostRequest(NamedTuple):
    """POST request; the content contains UID instead of the job's uid."""

    kind: str
    path: str
    content: str


@dataclass(frozen=True)
class FloorAttempt:
    """Requests of one attempt. `stopping` is the status after a failure."""

    starting: str
    running: str
    stopping: str
    objects: tuple[PostRequest, ...]
    pods: tuple[PostRequest, ...]
    config_map_path: str


def render_attempts(name: str, *, nodes: int, attempts: int = 2) -> tuple[FloorAttempt, ...]:
    """Render the requests of a job whose rank 0 is killed in every attempt, with the statuses that decide() returns."""
    metadata = {"name": name, "namespace": NAMESPACE, "uid": UID, "generation": 1, "resourceVersion": "1"}
    body = build_job_body(name, nodes)
    job = FineTuneJob.parse({**body, "metadata": metadata})
    job, _ = decide_once(job, Observation(nodes=(), service_exists=False, is_fresh=True))
    rendered: list[FloorAttempt] = []
    for attempt in range(attempts):
        running_pods = tuple(running_pod(job, rank, attempt=attempt) for rank in range(nodes))
        failed_pod = finished_pod(job, 0, attempt=attempt, message=json.dumps(KILLED_RANK_TERMINATION))
        running_job = decide_repeatedly(job, build_observation(job, *running_pods))
        stopping_job, _ = decide_once(running_job, build_observation(running_job, failed_pod, *running_pods[1:]))
        rendered.append(render_attempt(job, running_job, stopping_job))
        observation = build_observation(stopping_job, failed_pod, tombstones=running_pods[1:])
        job = decide_repeatedly(stopping_job, observation)
    return tuple(rendered)


def render_attempt(starting_job: FineTuneJob, running_job: FineTuneJob, stopping_job: FineTuneJob) -> FloorAttempt:
    """Render the requests of the current attempt; the attempts of a job share one Service."""
    attempt = starting_job.status.attempt or 0
    children = build_children(plan_run(starting_job, attempt=attempt, settings=SETTINGS))
    object_kinds = ("ConfigMap",) if attempt else ("Service", "ConfigMap")
    creates = [
        PostRequest(child["kind"], collection_path(child["kind"], NAMESPACE), json.dumps(child)) for child in children
    ]
    config_map = names.config_map_name(starting_job.metadata.name, UID, attempt)
    starting, running, stopping = (
        json.dumps(render_status(job.status)) for job in (starting_job, running_job, stopping_job)
    )
    return FloorAttempt(
        starting=starting,
        running=running,
        stopping=stopping,
        objects=tuple(create for create in creates if create.kind in object_kinds),
        pods=tuple(create for create in creates if create.kind == "Pod"),
        config_map_path=object_path("ConfigMap", NAMESPACE, config_map),
    )


def decide_repeatedly(job: FineTuneJob, observation: Observation) -> FineTuneJob:
    """Return the job with the status after which a further pass changes nothing."""
    for _ in range(MAX_PASSES):
        next_job, _ = decide_once(job, observation)
        if next_job.status == job.status:
            return job
        job = next_job
    raise AssertionError(f"the status still changes after {MAX_PASSES} passes: {job.status}")


def render_status_write(body: RawBody, status: str) -> str:
    """Render the PUT request that replaces the status of a job with this body."""
    fields = {key: body["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    head = json.dumps(
        {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": fields, "spec": body["spec"]}
    )
    return f'{head[:-1]}, "status": {status}}}'
