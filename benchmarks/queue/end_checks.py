"""Checks at the end of the queue benchmark; each returned line is something that is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from benchmarks.load.job_bodies import JOBS_PATH
from benchmarks.queue.cluster_queue import read_reserved_gpus
from benchmarks.queue.job_plans import ENDING_ACTIONS, JobAction, QueuedJob
from benchmarks.queue.quota_observer import WORKLOADS_PATH, QuotaObserver
from benchmarks.soak.checks import list_children
from benchmarks.soak.requests import delete
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import extend_path

SETTLE_TIMEOUT_SECONDS = 60.0
GARBAGE_COLLECTION_SECONDS = 180.0
POLL_SECONDS = 1.0

RawBody = dict[str, Any]


def check_ends(observer: QuotaObserver, plans: Mapping[str, QueuedJob]) -> list[str]:
    """Return the jobs that are not Complete; a cancelled or deleted job may have completed before."""
    problems = []
    for name, plan in plans.items():
        if observer.has_condition(name, "Complete") or (
            plan.action is JobAction.DELETE and name in observer.deleted_jobs
        ):
            continue
        status = observer.jobs.get(name, {}).get("status", {})
        reason = (status.get("attempts") or [{}])[-1].get("reason", "")
        if plan.action is JobAction.CANCEL and reason == "Cancelled":
            continue
        waiting = status.get("waiting", {}).get("message", "")
        problems.append(f"{name} ({plan.action}) is {status.get('phase')} {reason} {waiting}".strip())
    return problems


def check_restarts(observer: QuotaObserver, plans: Mapping[str, QueuedJob], failed_jobs: set[str]) -> list[str]:
    """Return the jobs that used restarts, except one after the failure of a rank; preemptions use none.

    A rank that fails while the job is being preempted uses none either.
    """
    problems = []
    for name, plan in plans.items():
        counts = observer.jobs.get(name, {}).get("status", {}).get("withoutProgress", {})
        used = counts.get("counted", 0) + counts.get("infrastructure", 0)
        if plan.action not in ENDING_ACTIONS and used > (name in failed_jobs):
            problems.append(f"{name} ({plan.action}) used {used} restarts")
    return problems


async def check_released_quota(api: ApiClient, observer: QuotaObserver) -> list[str]:
    """Return what still holds quota after all jobs have ended, although the finished jobs exist."""

    async def list_holders() -> list[str]:
        reserved = await read_reserved_gpus(api)
        holders = [f"{reserved} GPUs are reserved after all jobs have ended"] if reserved else []
        return holders + [
            f"pod {pod['metadata']['name']} is held by Kueue after its job has ended"
            for pod in observer.list_pods()
            if names.KUEUE_FINALIZER in pod["metadata"].get("finalizers", ())
        ]

    return await _wait_until_empty(list_holders, SETTLE_TIMEOUT_SECONDS)


async def check_leftovers(api: ApiClient, observer: QuotaObserver) -> list[str]:
    """Delete all jobs, and return the children and Workloads that remain."""
    for name in observer.jobs.keys() - observer.deleted_jobs:
        await delete(api, extend_path(JOBS_PATH, name))

    async def list_leftovers() -> list[str]:
        workloads = (await api.call("GET", WORKLOADS_PATH))["items"]
        children = [(kind, body) for kind, body in await list_children(api)]
        leftovers = [*(("Workload", body) for body in workloads), *children]
        return [f"{kind} {body['metadata']['name']} remains after all jobs were deleted" for kind, body in leftovers]

    return await _wait_until_empty(list_leftovers, GARBAGE_COLLECTION_SECONDS)


async def _wait_until_empty(list_problems: Callable[[], Awaitable[list[str]]], timeout_seconds: float) -> list[str]:
    deadline = time.monotonic() + timeout_seconds
    while (problems := await list_problems()) and time.monotonic() < deadline:  # noqa: ASYNC110  polls the API
        await asyncio.sleep(POLL_SECONDS)
    return problems
