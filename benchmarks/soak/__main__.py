"""Entry point of `make soak`, which runs jobs with faults while the operator is paused, killed and upgraded.

Every job must end as its script expects, no attempt may end without a cause, no object may remain after its job, and
the memory of the operator must not grow. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig import FAKE_NODES, start_fake_cluster
from benchmarks.soak.checks import (
    check_final_states,
    check_garbage_collection,
    check_logs,
    check_remaining_objects,
)
from benchmarks.soak.disturbances import Disturber, Kind, plan_disturbances
from benchmarks.soak.k8s_nodes import NodeRemover
from benchmarks.soak.replicas import ReplicaPair
from benchmarks.soak.report import (
    Rows,
    build_operator_rows,
    build_recovery_rows,
    count_ends,
    describe_times,
    measure_memory,
    measure_restarts,
    render_markdown,
    write_report,
)
from benchmarks.soak.script_runner import ScriptRunner
from benchmarks.soak.scripts import JobPlan, plan_jobs
from benchmarks.soak.state import SoakState
from benchmarks.soak.tenants import Tenants
from finetune_operator.kube.api_client import ApiClient
from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError
from testing.upgrade.releases import Release, write_next_release, write_this_release

CLUSTER = "soak"
RESULT_FOLDER = Path(__file__).parents[2] / "build" / "soak"
TIMEOUT_SECONDS = 300.0  # limit for jobs that still run after the last fault
JOBS_PER_MINUTE = 10
MAX_PRINTED_PROBLEMS = 30
HOST_STALL_SECONDS = 3.0


def main() -> int:
    """Run the soak test; return exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of the faults (default 30)")
    parser.add_argument("--jobs", type=int, help=f"default: {JOBS_PER_MINUTE} per minute")
    parser.add_argument("--at-once", type=int, default=30, help="jobs that run at the same time (default 30)")
    parser.add_argument(
        "--disturb", default=",".join(Kind), help="disturbances of the operator (default pause,kill,upgrade; or none)"
    )
    parser.add_argument("--rest", type=float, default=25.0, help="seconds between disturbances (default 25)")
    parser.add_argument("--tenants-every", type=float, default=10.0, help="seconds between interferences (default 10)")
    parser.add_argument("--remove-node-every", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    options.jobs = options.jobs or max(1, int(JOBS_PER_MINUTE * options.minutes))
    problems = asyncio.run(run_soak_test(options))
    for line in problems[:MAX_PRINTED_PROBLEMS]:
        print(f"WRONG: {line}")
    print(f"{len(problems)} things wrong")
    return 1 if problems else 0


@dataclass(frozen=True)
class Soak:
    """Actors of a soak test."""

    api: ApiClient
    state: SoakState
    pair: ReplicaPair
    scripts: ScriptRunner
    tenants: Tenants
    nodes: NodeRemover
    disturber: Disturber


async def run_soak_test(options: argparse.Namespace) -> list[str]:
    """Run the soak test, print and write the figures, and return what is wrong."""
    shutil.rmtree(RESULT_FOLDER, ignore_errors=True)
    RESULT_FOLDER.mkdir(parents=True)
    releases = write_releases(Cache.from_environment())
    async with start_fake_cluster(CLUSTER, keep_cluster=options.keep) as (cluster, api):
        plans = plan_jobs(options.jobs, seconds=60 * options.minutes, seed=options.seed)
        state, pair = SoakState(), ReplicaPair(cluster.kubeconfig, RESULT_FOLDER)
        async with _run_informers(api, state):
            try:
                pair.start(releases[0])
                pair.start(releases[0])
                await pair.wait_until_ready()
                random_source = random.Random(options.seed)
                deadline = time.monotonic() + 60 * options.minutes
                soak = Soak(
                    api=api,
                    state=state,
                    pair=pair,
                    scripts=ScriptRunner(api, state, random_source, deadline=deadline, at_once=options.at_once),
                    tenants=Tenants(api, state, random_source),
                    nodes=NodeRemover(api, state, random_source),
                    disturber=Disturber(pair, state, api=api, cluster=cluster, releases=releases),
                )
                return await _run_with_faults(soak, plans, options, deadline=deadline)
            finally:
                pair.kill_all()


def write_releases(cache: Cache) -> tuple[Release, Release]:
    """Write the source trees of this release and the next one below the cache folder."""
    folder = cache.root / "soak"
    shutil.rmtree(folder, ignore_errors=True)
    this, following = Release("this", folder / "this"), Release("next", folder / "next")
    write_this_release(this.tree)
    write_next_release(following.tree)
    return this, following


@asynccontextmanager
async def _run_informers(api: ApiClient, state: SoakState) -> AsyncIterator[None]:
    informers = state.build_informers(api)
    tasks = [asyncio.create_task(informer.run()) for informer in informers]
    for informer in informers:
        await informer.synced.wait()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_with_faults(
    soak: Soak, plans: tuple[JobPlan, ...], options: argparse.Namespace, *, deadline: float
) -> list[str]:
    kinds = [Kind(name) for name in options.disturb.split(",") if name != "none"]
    pair_task = asyncio.create_task(soak.pair.run())
    lag_task = asyncio.create_task(_watch_host(soak.state))
    fault_tasks = [
        asyncio.create_task(soak.tenants.run(interval_seconds=options.tenants_every)),
        asyncio.create_task(soak.nodes.run(node_count=FAKE_NODES, interval_seconds=options.remove_node_every)),
    ]
    disturbances = plan_disturbances(kinds, random.Random(options.seed)) if kinds else iter(())
    disturb_task = asyncio.create_task(soak.disturber.run(disturbances, rest_seconds=options.rest, deadline=deadline))
    script_task = asyncio.create_task(_run_scripts(soak.scripts, plans))
    tasks: tuple[asyncio.Task[None], ...] = (pair_task, lag_task, *fault_tasks, disturb_task, script_task)
    try:
        # Run the faults until the end of the test; an exception of an actor ends the test.
        await _wait_for_tasks(tasks, deadline - time.monotonic())
        await disturb_task
        for task in fault_tasks:
            task.cancel()
        await soak.tenants.clean_up()
        # Wait for the remaining jobs, then check everything.
        await _wait_for_tasks((pair_task, script_task), TIMEOUT_SECONDS, until=script_task)
        return await _check_and_report(soak, plans, options, pair_task)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_scripts(scripts: ScriptRunner, plans: Iterable[JobPlan]) -> None:
    async with asyncio.TaskGroup() as group:
        for plan in plans:
            group.create_task(scripts.run_script(plan))


async def _wait_for_tasks(
    tasks: Iterable[asyncio.Task[None]], seconds: float, *, until: asyncio.Task[None] | None = None
) -> None:
    """Wait for the given time, or until one task has ended; raise the exception of a task."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (until is not None and until.done()):
        await asyncio.sleep(0.5)
        for task in tasks:
            if task.done():
                task.result()


async def _watch_host(state: SoakState) -> None:
    """Print when this process was not scheduled in time, because the operator may have lost its Lease by that."""
    while True:
        started_at = time.monotonic()
        await asyncio.sleep(1.0)
        if (late := time.monotonic() - started_at - 1.0) > HOST_STALL_SECONDS:
            print(f"the host or this process stalled for {late:.1f} s with {len(state.jobs)} jobs", flush=True)


async def _check_and_report(
    soak: Soak, plans: tuple[JobPlan, ...], options: argparse.Namespace, pair_task: asyncio.Task[None]
) -> list[str]:
    state, pair = soak.state, soak.pair
    problems = [
        *check_final_states(state, plans),
        *await check_remaining_objects(soak.api, state),
        *state.list_unexplained_failures(),
        *state.list_wrong_restart_counts(),
    ]
    problems += await check_garbage_collection(soak.api, state)
    pair_task.cancel()
    for replica in list(pair.replicas):
        await pair.stop(replica)
    memory = measure_memory(replica.samples for replica in pair.all_replicas)
    if memory is not None and not memory.is_flat:
        problems.append(f"the memory of the operator grows: {memory}")
    problems += [*state.problems, *pair.problems, *check_logs(replica.log for replica in pair.all_replicas)]
    rows = [
        *_build_job_rows(soak, plans, options),
        *build_operator_rows(pair.all_replicas, memory, jobs=soak.scripts.started),
    ]
    markdown = render_markdown(rows, soak.disturber.effects, count_ends(state))
    write_report(RESULT_FOLDER, markdown, rows=rows, effects=soak.disturber.effects, problems=problems)
    print(markdown)
    return problems


def _build_job_rows(soak: Soak, plans: tuple[JobPlan, ...], options: argparse.Namespace) -> Rows:
    """Return the figures of jobs, actions and restarts."""
    state = soak.state
    ends = Counter(
        " ".join(state.find_final_state(plan.name) or ("no end",)).strip() for plan in plans if plan.name in state.jobs
    )
    undisturbed, disturbed = measure_restarts(state, soak.disturber.effects)
    return [
        ("seed, minutes, disturbances", f"{options.seed}, {options.minutes:g}, {options.disturb}"),
        ("jobs", str(soak.scripts.started)),
        *((f"ended: {end}", str(count)) for end, count in ends.most_common()),
        *((f"action: {action}", str(count)) for action, count in soak.scripts.actions.most_common()),
        *((f"tenants: {title}", str(count)) for title, count in soak.tenants.acts.most_common()),
        ("Kubernetes nodes removed", str(soak.nodes.removed_count)),
        *build_recovery_rows(soak.disturber.effects),
        ("leaders that exited after a pause", str(soak.pair.exits_after_pause)),
        ("restarts", str(sum(state.restarts.values()))),
        ("from a failure until the next attempt ran, without a disturbance", describe_times(undisturbed)),
        ("from a failure until the next attempt ran, with a disturbance", describe_times(disturbed)),
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HarnessError as error:
        sys.exit(f"soak: {error}")
