"""Entry point of `make soak`, which runs hundreds of jobs with faults, removes nodes and kills the operator.

Every job must end as its script expects, and no object may remain after the jobs are deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress

from benchmarks.load.job_bodies import JOBS_PATH, RawBody
from benchmarks.rig import FAKE_NODES, NAMESPACE, start_fake_cluster
from benchmarks.soak.actors import NodeRemover, OperatorRunner, ScriptRunner, SoakState
from benchmarks.soak.scripts import JobPlan, plan_jobs
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.cluster import collection_path
from testing.cluster.throwaway import ThrowawayCluster

TIMEOUT_SECONDS = 300.0  # limit for jobs that still run after the last fault, and for garbage collection
POLL_INTERVAL_SECONDS = 5.0
NODE_REMOVAL_INTERVAL_SECONDS = 20.0
KINDS = ("Pod", "Service", "ConfigMap")


def main() -> int:
    """Run the soak test; return exit code 1 if a job ended unexpectedly or objects remain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of the faults (default 30)")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument(
        "--kill-every", type=float, default=60.0, help="seconds after which an operator is killed (default 60)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    errors = asyncio.run(run_soak_test(options))
    for line in errors[:20]:
        print(f"ERROR: {line}")
    print(f"{len(errors)} errors")
    return 1 if errors else 0


async def run_soak_test(options: argparse.Namespace) -> list[str]:
    """Run the soak test, print the figures and return the errors."""
    async with start_fake_cluster("soak", keep_cluster=options.keep) as (cluster, api):
        return await _run_jobs_with_faults(cluster, api, options)


async def _run_jobs_with_faults(cluster: ThrowawayCluster, api: ApiClient, options: argparse.Namespace) -> list[str]:
    seconds = 60.0 * options.minutes
    random_source = random.Random(options.seed)
    plans = plan_jobs(options.jobs, seconds=seconds, seed=options.seed)
    state, operator_runner = SoakState(api), OperatorRunner(cluster.kubeconfig)
    started_at = time.monotonic()
    script_runner, node_remover = (
        ScriptRunner(state, random_source, deadline=started_at + seconds),
        NodeRemover(api, random_source),
    )
    informers = state.build_informers()
    informer_tasks = [asyncio.create_task(informer.run()) for informer in informers]
    for informer in informers:
        await informer.synced.wait()
    faults_are_active = lambda: time.monotonic() - started_at < seconds  # noqa: E731
    operator_task = asyncio.create_task(
        operator_runner.run_operators(interval_seconds=options.kill_every, may_kill=faults_are_active)
    )
    removal_task = asyncio.create_task(
        node_remover.run(node_count=FAKE_NODES, interval_seconds=NODE_REMOVAL_INTERVAL_SECONDS)
    )
    script_tasks = asyncio.gather(*(script_runner.run_script(plan) for plan in plans))
    try:
        await _wait_for_tasks([operator_task, removal_task], seconds)
        removal_task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(script_tasks, TIMEOUT_SECONDS)
        errors = [*_check_final_states(state, plans), *await _check_remaining_objects(api, state)]
        print(_render_job_table(state, script_runner, plans))
        errors += await _check_garbage_collection(api, state)
    finally:
        script_tasks.cancel()
        for task in (operator_task, removal_task, *informer_tasks):
            task.cancel()
        await asyncio.gather(operator_task, return_exceptions=True)
    print(_render_operator_table(operator_runner, nodes_removed=node_remover.removed_count, jobs=len(plans)))
    return errors


async def _wait_for_tasks(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Wait for the given time; raise the exception of a task that ends earlier."""
    ended_tasks, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended_tasks:
        task.result()


def _check_final_states(state: SoakState, plans: tuple[JobPlan, ...]) -> list[str]:
    errors = []
    for plan in plans:
        expected, actual = (plan.script.phase, plan.script.reason), state.find_final_state(plan.name)
        if actual != expected:
            phase = state.jobs.get(plan.name, {}).get("status", {}).get("phase")
            errors.append(f"{plan.name} ({plan.script}): {actual or phase}, expected {expected}")
    return errors


async def _check_remaining_objects(api: ApiClient, state: SoakState) -> list[str]:
    """Return an error for each unfinished pod of an ended job and for each remaining object of a deleted job."""
    await asyncio.sleep(30.0)
    existing_uids = {job["metadata"]["uid"] for name, job in state.jobs.items() if name not in state.deleted}
    errors = []
    for kind, body in await _list_children(api):
        name, labels = body["metadata"]["name"], body["metadata"].get("labels", {})
        if labels[names.JOB_UID] not in existing_uids:
            errors.append(f"{kind} {name} remains after its job was deleted")
        elif (
            kind == "Pod"
            and body["status"].get("phase") in ("Pending", "Running")
            and state.find_final_state(labels[names.JOB_NAME])
        ):
            errors.append(f"{kind} {name} is {body['status']['phase']} although its job ended")
    return errors


async def _check_garbage_collection(api: ApiClient, state: SoakState) -> list[str]:
    """Delete all jobs, and return an error for each child that is not garbage-collected."""
    for name in state.jobs.keys() - state.deleted:
        await api.call("DELETE", f"{JOBS_PATH}/{name}", body={"kind": "DeleteOptions", "apiVersion": "v1"})
    remaining_children: list[tuple[str, RawBody]] = []
    for _ in range(int(TIMEOUT_SECONDS / POLL_INTERVAL_SECONDS)):
        remaining_children = await _list_children(api)
        if not remaining_children:
            break
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    return [f"{kind} {body['metadata']['name']} remains after its job was deleted" for kind, body in remaining_children]


async def _list_children(api: ApiClient) -> list[tuple[str, RawBody]]:
    """Return the kind and body of each child of all jobs."""
    return [
        (kind, body)
        for kind in KINDS
        async for page in api.list_pages(collection_path(kind, NAMESPACE), selector=names.JOB_UID)
        for body in page["items"]
    ]


def _render_job_table(state: SoakState, script_runner: ScriptRunner, plans: tuple[JobPlan, ...]) -> str:
    """Render a table of job results and performed actions."""
    final_state_counts = Counter(" ".join(state.find_final_state(plan.name) or ("no end",)).strip() for plan in plans)
    return _render_table(
        [
            *((f"ended: {end}", count) for end, count in final_state_counts.most_common()),
            *((f"action: {action}", count) for action, count in script_runner.actions.most_common()),
            ("restarts of jobs", state.count_restarts()),
        ]
    )


def _render_operator_table(operator_runner: OperatorRunner, *, nodes_removed: int, jobs: int) -> str:
    """Render a table of the startup times, memory and API requests of all operator processes."""
    last_seconds = max((seconds for seconds, _ in operator_runner.memory_samples), default=0.0)
    first_third = [mib for seconds, mib in operator_runner.memory_samples if seconds < last_seconds / 3]
    last_third = [mib for seconds, mib in operator_runner.memory_samples if seconds > 2 * last_seconds / 3]
    return _render_table(
        [
            ("Kubernetes nodes removed", nodes_removed),
            ("operators killed", operator_runner.kills),
            ("an operator's start until ready, s, median", f"{statistics.median(operator_runner.startup_seconds):.2f}"),
            ("memory, first third, MiB, median and maximum", _format_median_and_max(first_third)),
            ("memory, last third, MiB, median and maximum", _format_median_and_max(last_third)),
            ("API requests per job, of killed operators", f"{operator_runner.requests.total() / jobs:.1f}"),
        ]
    )


def _render_table(rows: list[tuple[str, object]]) -> str:
    return "\n".join(f"{title.ljust(50)}  {value}" for title, value in rows)


def _format_median_and_max(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "none"


if __name__ == "__main__":
    sys.exit(main())
