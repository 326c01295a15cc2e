"""Runs whole passes over the objects of a case, from their arrival in the caches to the requests of the operator."""

import json
import time
from asyncio import Runner
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from finetune_api.termination import parse_termination
from finetune_operator.controller.child_cache import ChildCache
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.job_cache import JobCache, get_job_key
from finetune_operator.controller.progress_poller import PolledDegradations, parse_status
from finetune_operator.controller.reconcile import PassDependencies, PassResult, reconcile, reconcile_degraded
from finetune_operator.kube.cluster import ClusterError
from finetune_operator.observation.projection import project_pod
from testing.builders.jobs import NOW, SETTINGS, UID
from testing.fakes.recording_cluster import RecordingCluster
from testing.fuzz.cases import PassCase, RawBody

MAX_STATUS_BYTES = 256 * 1024
MAX_PASSES = 3  # the operator requeues a job at once after a status write


class StatusTooLarge(AssertionError):
    """A written status has more bytes than the API server stores reliably, or contains a number that is not finite."""


def run_case(case: PassCase, runner: Runner) -> tuple[str, list[float]]:
    """Store the objects in caches, run passes and a degraded pass; return the outcome and the CPU seconds of each pass.

    Any exception but ClusterError, which the operator retries, is unforeseen and raised.
    """
    started_at = time.thread_time()
    jobs, cached = _fill_caches(case)
    key = get_job_key(case.job)
    cluster = RecordingCluster(pods=cached.pods)
    dependencies = PassDependencies(cluster, SETTINGS, lambda: NOW)
    outcome = "unchanged"
    cpu_seconds = []

    def run_pass(coroutine: Coroutine[Any, Any, PassResult]) -> PassResult:
        nonlocal started_at
        try:
            return runner.run(coroutine)
        finally:
            cpu_seconds.append(time.thread_time() - started_at)
            started_at = time.thread_time()

    try:
        for _ in range(MAX_PASSES):
            body = jobs.get(key)
            assert body is not None
            result = run_pass(reconcile(dependencies, body, cached))
            if not jobs.store_if_newer(result.job):
                break
        if cluster.statuses:
            outcome = str(cluster.statuses[-1].get("phase"))
    except ClusterError as error:
        outcome = type(error).__name__
    with suppress(ClusterError):
        run_pass(reconcile_degraded(dependencies, case.job, cached, problem="p"))
    _check_statuses(cluster.statuses)
    return outcome, cpu_seconds


def _fill_caches(case: PassCase) -> tuple[JobCache, CachedState]:
    jobs = JobCache()
    jobs.store_if_newer(case.job)
    key = get_job_key(case.job)
    children = ChildCache(
        on_change=lambda changed_key: None,
        current_attempt=jobs.current_attempt,
        is_current_pod=jobs.is_current_pod,
        clock=lambda: 0.0,
    )
    for body in (*case.deleted_pods, *case.pods):
        children.on_pod_event(None, project_pod(body))
    for body in case.deleted_pods:
        children.on_pod_event(project_pod(body), None)
    for body in case.pods:  # a deleted pod may have had the same uid
        children.on_pod_event(None, project_pod(body))
    response = parse_status(case.response.encode(errors="surrogatepass"), job_uid=UID, attempt=0, now=NOW)
    cached = CachedState(
        pods=children.pods(key),
        deleted_pods=children.deleted_pods(key),
        progress=response.progress,
        degradations=None if response.degraded is None else PolledDegradations(0, response.degraded),
    )
    return jobs, cached


def _check_statuses(statuses: list[RawBody]) -> None:
    for status in statuses:
        try:
            size = len(json.dumps(status, allow_nan=False))
        except ValueError as error:
            raise StatusTooLarge(str(error)) from error
        if size >= MAX_STATUS_BYTES:
            raise StatusTooLarge(f"{size} bytes")


def parse_text(kind: str, text: str) -> str:
    """Parse a termination message or a /status response; return whether the parser accepted it."""
    if kind == "message":
        parsed: object = parse_termination(text)
    else:
        parsed = parse_status(text.encode(errors="surrogatepass"), job_uid=UID, attempt=0, now=NOW).progress
    return f"{kind} ignored" if parsed is None else f"{kind} accepted"
