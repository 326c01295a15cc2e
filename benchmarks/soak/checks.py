"""Checks at the end of a soak test; each returned line is something that is wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.load.job_bodies import JOBS_PATH, RawBody
from benchmarks.rig import NAMESPACE
from benchmarks.soak.requests import delete
from benchmarks.soak.scripts import JobPlan
from benchmarks.soak.state import SoakState
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import collection_path, extend_path

SETTLE_SECONDS = 30.0  # for the garbage collection of jobs that were deleted last
GARBAGE_COLLECTION_SECONDS = 300.0
POLL_INTERVAL_SECONDS = 5.0
KINDS = ("Pod", "Service", "ConfigMap")
MAX_LISTED_LOG_ERRORS = 5


def check_final_states(state: SoakState, plans: Iterable[JobPlan]) -> list[str]:
    """Compare the final state of each job that was created with its script."""
    problems = []
    for plan in plans:
        expected, actual = (plan.script.phase, plan.script.reason), state.find_final_state(plan.name)
        if plan.name in state.jobs and actual != expected:
            phase = state.jobs[plan.name].get("status", {}).get("phase")
            problems.append(f"{plan.name} ({plan.script}): {actual or phase}, expected {expected}")
    return problems


async def check_remaining_objects(api: ApiClient, state: SoakState) -> list[str]:
    """Return a line for each unfinished pod of an ended job and for each remaining object of a deleted job."""
    await asyncio.sleep(SETTLE_SECONDS)
    existing_uids = {job["metadata"]["uid"] for job in state.jobs.values()} - state.deleted_uids
    problems = []
    for kind, body in await list_children(api):
        name, labels = body["metadata"]["name"], body["metadata"].get("labels", {})
        uid = labels[names.JOB_UID]
        if uid not in existing_uids:
            problems.append(f"{kind} {name} remains after its job was deleted")
        elif kind == "Pod" and body["status"].get("phase") in ("Pending", "Running") and uid in state.final_states:
            problems.append(f"{kind} {name} is {body['status']['phase']} although its job ended")
    return problems


async def check_garbage_collection(api: ApiClient, state: SoakState) -> list[str]:
    """Delete all jobs, and return a line for each child that is not garbage-collected."""
    for name, job in state.jobs.items():
        if job["metadata"]["uid"] not in state.deleted_uids:
            await delete(api, extend_path(JOBS_PATH, name))
    deadline = time.monotonic() + GARBAGE_COLLECTION_SECONDS
    remaining = await list_children(api)
    while remaining and time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
        remaining = await list_children(api)
    return [f"{kind} {body['metadata']['name']} remains after all jobs were deleted" for kind, body in remaining]


async def list_children(api: ApiClient) -> list[tuple[str, RawBody]]:
    """Return the kind and body of each child of all jobs."""
    return [
        (kind, body)
        for kind in KINDS
        async for page in api.list_pages(collection_path(kind, NAMESPACE), selector=names.JOB_UID)
        for body in page["items"]
    ]


def check_logs(logs: Iterable[Path]) -> list[str]:
    """Return a line for each kind of unexpected error in the operators' logs: JSON lines with a traceback, or none."""
    count_by_error: dict[str, int] = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if error := find_unexpected_error(line):
                count_by_error[error] = count_by_error.get(error, 0) + 1
    return [f"operator log, {count} times: {error}" for error, count in count_by_error.items()][:MAX_LISTED_LOG_ERRORS]


def find_unexpected_error(line: str) -> str:
    """Return the last line of the traceback in a log record, or an empty string."""
    try:
        record = json.loads(line)
    except ValueError:
        return line if line.startswith("Traceback") else ""
    text = "\n".join(str(value) for value in record.values())
    return text.strip().splitlines()[-1][:300] if "Traceback" in text else ""
