"""Entry point of `make bench-queue`, which runs jobs of mixed size and priority through one queue of Kueue.

API server, scheduler, Kueue and the operator are real, Kubernetes nodes and containers are simulated. Every job must
end, the quota must never be exceeded, and preemptions must use no restarts. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.report import format_rows
from benchmarks.queue.cluster_queue import add_gpus, install_kueue
from benchmarks.queue.end_checks import check_ends, check_leftovers, check_released_quota, check_restarts
from benchmarks.queue.job_plans import JobAction, QueuedJob, plan_queued_jobs
from benchmarks.queue.queue_report import Rows, build_quota_rows, build_wait_rows, write_results
from benchmarks.queue.quota_observer import QuotaObserver
from benchmarks.queue.simulated_kubelet import SimulatedKubelet
from benchmarks.queue.timeline import measure_totals
from benchmarks.queue.users import Users
from benchmarks.rig import (
    count_requests,
    create_operator_log,
    read_cpu_seconds,
    read_memory_mib,
    read_metrics,
    start_fake_cluster,
    start_operator,
    wait_until_operator_ready,
)
from finetune_operator.kube.api_client import ApiClient
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.processes import find_daemons
from testing.cluster.kwok import OMITTED_STAGE
from testing.cluster.throwaway import ThrowawayCluster

CLUSTER = "kwok"
GPUS_PER_NODE = 8
OMITTED_STAGES = (OMITTED_STAGE, "pod-delete")  # the simulated kubelet ends containers and confirms deletions
READY_TIMEOUT_SECONDS = 60.0
RESULT_FOLDER = Path(__file__).parents[2] / "build" / "queue"
MAX_PRINTED_PROBLEMS = 30
MAX_REQUEST_ROWS = 10


def main() -> int:
    """Run the benchmark; return exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="default 200")
    parser.add_argument("--quota", type=int, default=64, help="GPUs of the queue (default 64)")
    parser.add_argument("--nodes", type=int, default=10, help="Kubernetes nodes with 8 GPUs each (default 10)")
    parser.add_argument("--seconds", type=float, default=180.0, help="time in which the jobs arrive (default 180)")
    parser.add_argument("--timeout", type=float, default=1200.0, help="limit for all jobs in seconds (default 1200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up, without Kueue")
    options = parser.parse_args()
    problems = asyncio.run(run_benchmark(options))
    for line in problems[:MAX_PRINTED_PROBLEMS]:
        print(f"WRONG: {line}")
    print(f"{len(problems)} things wrong")
    return 1 if problems else 0


@dataclass(frozen=True)
class QueueRun:
    """Actors of one run."""

    api: ApiClient
    plans: Mapping[str, QueuedJob]
    observer: QuotaObserver
    kubelet: SimulatedKubelet
    users: Users


async def run_benchmark(options: argparse.Namespace) -> list[str]:
    """Run all jobs, print and write the figures, and return what is wrong."""
    shutil.rmtree(RESULT_FOLDER, ignore_errors=True)
    RESULT_FOLDER.mkdir(parents=True)
    jobs = plan_queued_jobs(options.jobs, seconds=options.seconds, quota=options.quota, seed=options.seed)
    plans = {job.name: job for job in jobs}
    async with start_fake_cluster(
        CLUSTER, keep_cluster=options.keep, node_count=options.nodes, omitted_stages=OMITTED_STAGES
    ) as (cluster, api):
        await add_gpus(api, node_count=options.nodes, gpus_per_node=GPUS_PER_NODE)
        with (
            install_kueue(cluster, quota=options.quota),
            start_operator(cluster.kubeconfig, create_operator_log()) as operator,
        ):
            await wait_until_operator_ready(timeout_seconds=READY_TIMEOUT_SECONDS)
            async with start_actors(api, plans, seed=options.seed) as run:
                before = read_host_cpu_seconds()
                problems = await run_jobs(run, timeout_seconds=options.timeout)
                busy = read_host_cpu_seconds() - before
                rows = [*build_rows(run, options), *measure_programs(cluster, operator.pid, jobs=len(jobs))]
                rows.append(("CPU time of all processes of the host during the jobs", f"{busy:.0f} s"))
                problems += await check_run(run, quota=options.quota)
            if operator.poll() is not None:
                problems.append(f"the operator has ended with exit code {operator.returncode}")
    write_results(RESULT_FOLDER, rows, problems=problems, changes=run.observer.changes)
    (RESULT_FOLDER / "jobs.json").write_text(json.dumps(list(run.observer.jobs.values())) + "\n")
    print(format_rows([*rows]))
    return problems


@asynccontextmanager
async def start_actors(api: ApiClient, plans: Mapping[str, QueuedJob], *, seed: int) -> AsyncIterator[QueueRun]:
    """Start the informers and the simulated kubelet, and stop them at the end."""
    kubelet = SimulatedKubelet(api, plans, random.Random(seed))
    observer = QuotaObserver(plans, on_pod_event=kubelet.on_pod_event)
    informers = observer.build_informers(api)
    tasks = [asyncio.create_task(informer.run()) for informer in informers]
    try:
        for informer in informers:
            await informer.synced.wait()
        yield QueueRun(api, plans, observer, kubelet, Users(api, observer, random.Random(seed)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await kubelet.stop()


async def run_jobs(run: QueueRun, *, timeout_seconds: float) -> list[str]:
    """Run all jobs until they have ended or the time limit has passed."""
    try:
        async with asyncio.timeout(timeout_seconds), asyncio.TaskGroup() as group:
            for plan in run.plans.values():
                group.create_task(run.users.run_job(plan))
    except TimeoutError:
        unfinished = sum(not run.observer.has_ended(name) for name in run.plans)
        return [f"{unfinished} jobs have not ended after {timeout_seconds:.0f} s"]
    return []


async def check_run(run: QueueRun, *, quota: int) -> list[str]:
    """Return what is wrong after all jobs have ended. Deletes the jobs."""
    totals = measure_totals(run.observer.changes)
    problems = [
        f"{title} {gpus} GPUs, more than the quota of {quota}"
        for title, gpus in (("reserved", totals.max_reserved), ("occupied", totals.max_charged))
        if gpus > quota
    ]
    return [
        *problems,
        *check_ends(run.observer, run.plans),
        *check_restarts(run.observer, run.plans, run.kubelet.failed_jobs),
        *await check_released_quota(run.api, run.observer),
        *await check_leftovers(run.api, run.observer),
        *run.kubelet.problems,
    ]


def build_rows(run: QueueRun, options: argparse.Namespace) -> Rows:
    """Return the figures of the jobs and of the quota."""
    observer, plans = run.observer, run.plans
    attempts = [record for job in observer.jobs.values() for record in job.get("status", {}).get("attempts", ())]
    ends = Counter(
        "deleted" if name in observer.deleted_jobs else observer.jobs.get(name, {}).get("status", {}).get("phase", "")
        for name in plans
    )
    preempted = sum(record.get("reason") == "Preempted" for record in attempts)
    sizes = sorted(plan.gpus for plan in plans.values())
    return [
        ("seed, seconds of arrivals", f"{options.seed}, {options.seconds:g}"),
        ("jobs", str(len(plans))),
        ("GPUs per job", f"{sizes[0]} to {sizes[-1]}, median {sizes[len(sizes) // 2]}"),
        *((f"  ended: {end}", str(count)) for end, count in ends.most_common()),
        *((f"  {action}", str(run.users.performed[action])) for action in JobAction if run.users.performed[action]),
        (f"  {JobAction.FAIL}", str(len(run.kubelet.failed_jobs))),
        *((f"evictions by Kueue, {reason}", str(count)) for reason, count in observer.evictions.most_common()),
        ("attempts that ended as Preempted", str(preempted)),
        *build_quota_rows(observer.changes, quota=options.quota),
        *build_wait_rows(observer.changes, plans),
    ]


def measure_programs(cluster: ThrowawayCluster, operator_pid: int, *, jobs: int) -> Rows:
    """Return CPU time and memory of the operator, and the CPU time of the other programs."""
    pids = {daemon.name: daemon.pid() for daemon in find_daemons(cluster.layout.daemons)}
    programs = ("kueue", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "etcd", "kwok")
    cpu_seconds = (f"{name} {read_cpu_seconds(Path(f'/proc/{pids[name]}')):.0f} s" for name in programs if name in pids)
    operator_seconds, requests = read_cpu_seconds(Path(f"/proc/{operator_pid}")), count_requests(read_metrics())
    return [
        ("CPU time of the operator", f"{operator_seconds:.1f} s, {1000 * operator_seconds / jobs:.0f} ms per job"),
        ("memory of the operator", f"{read_memory_mib(operator_pid):.0f} MiB"),
        ("API requests of the operator per job", f"{requests.total() / jobs:.1f}"),
        *((f"  {title}", f"{count / jobs:.1f}") for title, count in requests.most_common(MAX_REQUEST_ROWS)),
        ("CPU time of other programs", ", ".join((*cpu_seconds, f"this process {time.process_time():.0f} s"))),
    ]


def read_host_cpu_seconds() -> float:
    """Return the CPU time of all processes since the start of the host, without that of other virtual machines."""
    user, nice, system, _idle, _wait, irq, soft_irq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HarnessError as error:
        sys.exit(f"bench-queue: {error}")
