"""Whole passes over changed pods, jobs and termination messages, and the parsers of text from pods.

FINETUNE_EXAMPLES sets the number of passes; ten times as many texts are parsed (`make fuzz`).
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_api.termination import parse_termination
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.progress_poller import parse_progress
from finetune_operator.controller.reconcile import PassDependencies, reconcile, reconcile_degraded
from finetune_operator.kube.cluster import ClusterError
from testing.builders.jobs import NOW, SETTINGS, UID, finished_pod, job, pod, running_pod, terminating_pod
from testing.builders.mutations import mutate, mutate_text
from testing.builders.passes import build_raw_job, compute_status_after_observations, running_pods
from testing.fakes.recording_cluster import RecordingCluster

EXAMPLES = int(os.environ.get("FINETUNE_EXAMPLES", "300"))
MAX_STATUS_BYTES = 256 * 1024
SLOW_PASS_SECONDS = 0.2
RawBody = dict[str, Any]

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
STATUS_RESPONSE: RawBody = {"uid": UID, "attempt": 0, "namespace": "default", "job": "bert", "progress": PROGRESS}

fuzzing = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=tuple(HealthCheck))
seeds = st.integers(0, 2**63)
counts = st.integers(1, 6)
cpu_seconds: list[float] = []


@pytest.fixture(scope="module", autouse=True)
def _print_cpu_time() -> Iterator[None]:
    """Print the CPU time of the passes, which `make fuzz` reports."""
    yield
    if cpu_seconds:
        ordered = sorted(cpu_seconds)
        slow = sum(1 for seconds in ordered if seconds > SLOW_PASS_SECONDS)
        print(
            f"\n{len(ordered)} passes: CPU p50 {ordered[len(ordered) // 2] * 1000:.1f} ms,"
            f" p99 {ordered[len(ordered) * 99 // 100] * 1000:.1f} ms, max {ordered[-1] * 1000:.1f} ms,"
            f" {slow} over {SLOW_PASS_SECONDS * 1000:.0f} ms"
        )


def build_pods(source: random.Random) -> tuple[RawBody, ...]:
    """Return the pods of both nodes in random states, with changed fields of the same types."""
    owner = job()
    bodies = []
    for node_rank in (0, 1):
        state = source.randrange(5)
        if state == 0:
            body = pod(
                owner,
                node_rank,
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "lastTransitionTime": "2026-01-01T12:00:00Z",
                    }
                ],
            )
        elif state == 1:
            body = running_pod(owner, node_rank)
        else:
            message = mutate_text(json.dumps(MESSAGE), source, count=source.randrange(4))
            body = finished_pod(
                owner, node_rank, exit_code=source.choice((0, 1, 137)), message=message,
                finishedAt="2026-01-01T12:00:30Z", startedAt="2026-01-01T12:00:00Z",
            )  # fmt: skip
        if state == 4:
            body = terminating_pod(body)
        body["status"]["conditions"] = [
            *body["status"].get("conditions", ()),
            {
                "type": "DisruptionTarget",
                "status": source.choice(("True", "False")),
                "reason": "EvictionByEvictionAPI",
                "message": "m",
                "lastTransitionTime": "2026-01-01T12:00:00Z",
            },
        ]
        bodies.append(body)
    return tuple(bodies)


def change_pod(body: RawBody, source: random.Random, *, count: int) -> RawBody:
    """Return the pod with changed spec and status; the API server guarantees its metadata."""
    changed = {
        name: mutate(body[name], source, count=source.randrange(count + 1), keep_types=True)
        for name in ("spec", "status")
    }
    return {**body, **changed}


def run_pass(body: RawBody, cached: CachedState) -> None:
    """Run a pass, and a degraded pass; only ClusterError may be raised, and the status must be bounded."""
    cluster = RecordingCluster(pods=cached.pods)
    dependencies = PassDependencies(cluster, SETTINGS, lambda: NOW)
    started_at = time.process_time()
    try:
        asyncio.run(reconcile(dependencies, body, cached))
        asyncio.run(reconcile_degraded(dependencies, body, cached, problem="p"))
    except ClusterError:
        pass
    cpu_seconds.append(time.process_time() - started_at)
    for status in cluster.statuses:
        assert len(json.dumps(status, allow_nan=False)) < MAX_STATUS_BYTES


STATUSES = (
    JobStatus(),
    compute_status_after_observations(),
    compute_status_after_observations(running_pods()),
    compute_status_after_observations(running_pods(), (running_pod(job(), 0), finished_pod(job(), 1))),
)


@fuzzing
@given(seeds, counts)
def test_no_pod_raises_an_unforeseen_error(seed: int, count: int) -> None:
    source = random.Random(seed)
    pods = tuple(change_pod(body, source, count=source.randrange(count)) for body in build_pods(source))
    tombstones = tuple(change_pod(body, source, count=1) for body in build_pods(source)[: source.randrange(3)])

    run_pass(build_raw_job(source.choice(STATUSES)), CachedState(pods=pods, deleted_pods=tombstones))


@fuzzing
@given(seeds, counts)
def test_no_spec_or_status_raises_an_unforeseen_error(seed: int, count: int) -> None:
    source = random.Random(seed)
    body = build_raw_job(source.choice(STATUSES), suspend=source.random() < 0.3, activeDeadlineSeconds=50)
    changed = {
        name: mutate(body.get(name, {}), source, count=source.randrange(count + 1), keep_types=False)
        for name in ("spec", "status")
    }

    run_pass({**body, **changed}, CachedState(pods=build_pods(source)))


@settings(fuzzing, max_examples=EXAMPLES * 10)
@given(seeds, counts)
def test_no_text_of_a_pod_raises_in_a_parser(seed: int, count: int) -> None:
    source = random.Random(seed)

    parse_termination(mutate_text(json.dumps(MESSAGE), source, count=count))
    response = mutate_text(json.dumps(STATUS_RESPONSE), source, count=count)
    parse_progress(response.encode(errors="surrogatepass"), job_uid=UID, attempt=0, now=NOW)
