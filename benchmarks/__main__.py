"""Entry point of `make bench`, which measures the operator on a real API server, with pods that kwok simulates.

The figures of Kubeflow Trainer v2 + JobSet were measured on a host of the same size (2 cores, Kubernetes 1.36.3).
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.load import BaselineBenchmark, OperatorBenchmark
from benchmarks.rig import start_bench_rig
from benchmarks.table import PEER_FIGURES, Figures, render_table


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the operator on a real API server with kwok pods.")
    parser.add_argument("--jobs", type=int, default=100, help="jobs started at once (default 100)")
    parser.add_argument("--nodes", type=int, default=4, help="nodes per job (default 4)")
    parser.add_argument("--rounds", type=int, default=10, help="single jobs for the latency figures (default 10)")
    parser.add_argument("--no-floor", action="store_true", help="skip the baseline without an operator")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    figures = asyncio.run(run_benchmark(options))
    print(render_table(figures, PEER_FIGURES if (options.jobs, options.nodes) == (100, 4) else {}))
    return 0


async def run_benchmark(options: argparse.Namespace) -> Figures:
    async with start_bench_rig(keep_cluster=options.keep) as rig:
        benchmark = OperatorBenchmark(rig)
        figures: Figures = {}
        # warm-up: the first event in the watch of a new CRD may take 2 s
        await benchmark.measure_creation("first", nodes=2)
        await benchmark.delete(["first"])
        creation_seconds, restart_seconds = [], []
        for number in range(options.rounds):
            name = f"single-{number}"
            creation_seconds.append(await benchmark.measure_creation(name, nodes=2))
            await benchmark.wait_until_running([name], attempt=0, nodes=2)
            restart_seconds.append(await benchmark.measure_restart(name, nodes=2))
            await benchmark.delete([name])
        figures["one 2-node job, POST to both pods created"] = creation_seconds
        figures["after a failure, all pods of the next attempt running"] = restart_seconds
        if not options.no_floor:
            await measure_baseline(BaselineBenchmark(rig), options, figures)
        usage_before = rig.measure_usage()
        names = [f"many-{number:03}" for number in range(options.jobs)]
        figures[
            f"{options.jobs} jobs x {options.nodes} nodes at once, POST to all running"
        ] = await benchmark.measure_starts(names, nodes=options.nodes)
        figures[f"restart of all {options.jobs} at once"] = await benchmark.measure_restarts(names, nodes=options.nodes)
        usage_after = rig.measure_usage()
        figures["operator's CPU for both, s"] = [usage_after.cpu_seconds - usage_before.cpu_seconds]
        figures["operator's memory, MiB"] = [usage_after.memory_mib]
        for program, seconds in (usage_after.cluster_cpu_seconds - usage_before.cluster_cpu_seconds).most_common():
            figures[f"  {program}'s CPU, s"] = [seconds]
        figures["upper bound of a reconcile pass"] = list((usage_after.passes - usage_before.passes).elements())
        requests = usage_after.requests - usage_before.requests
        figures["API requests per job, both"] = [requests.total() / len(names)]
        for title, count in requests.most_common():
            figures[f"  {title}"] = [count / len(names)]
        return figures


async def measure_baseline(baseline: BaselineBenchmark, options: argparse.Namespace, figures: Figures) -> None:
    """Measure how long it takes to create and restart the same objects without an operator."""
    jobs = [f"baseline-{number:03}" for number in range(options.jobs)]
    start_seconds = await baseline.measure_starts(jobs, nodes=options.nodes)
    figures[f"baseline: objects of {options.jobs} jobs created directly, to all running"] = start_seconds
    figures["baseline: their pods deleted and created again"] = await baseline.measure_restarts(
        jobs, nodes=options.nodes
    )
    await baseline.delete(jobs)


if __name__ == "__main__":
    sys.exit(main())
