"""`make bench`: the operator on a real API server, with pods that kwok pretends to run.

Kubeflow Trainer v2 + JobSet did the same on a machine of the same size (2 cores, Kubernetes 1.36.3); its figures stand
beside ours.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.load import Floor, Load
from benchmarks.rig import bench_rig
from benchmarks.table import PEER, Figures, render_table


def main() -> int:
    parser = argparse.ArgumentParser(description="The operator on a real API server with kwok pods.")
    parser.add_argument("--jobs", type=int, default=100, help="jobs started at once (default 100)")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of each (default 4)")
    parser.add_argument("--rounds", type=int, default=10, help="single jobs for the latency figures (default 10)")
    parser.add_argument("--no-floor", action="store_true", help="only what the operator does, not the floor beside it")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    print(render_table(figures, PEER if (options.jobs, options.nodes) == (100, 4) else {}))
    return 0


async def measure(options: argparse.Namespace) -> Figures:
    async with bench_rig(keep=options.keep) as rig:
        load = Load(rig)
        figures: Figures = {}
        # not measured: a watch of a CRD that is seconds old may wait 2 s for its first event
        await load.start_to_created("first", nodes=2)
        await load.delete(["first"])
        created, restarted = [], []
        for number in range(options.rounds):
            name = f"single-{number}"
            created.append(await load.start_to_created(name, nodes=2))
            await load.all_running([name], attempt=0, nodes=2)
            restarted.append(await load.restart(name, nodes=2))
            await load.delete([name])
        figures["one 2-node job, POST to both pods created"] = created
        figures["after a failure, all pods of the next attempt running"] = restarted
        if not options.no_floor:
            await measure_floor(Floor(rig), options, figures)
        before = rig.usage()
        names = [f"many-{number:03}" for number in range(options.jobs)]
        figures[f"{options.jobs} jobs x {options.nodes} nodes at once, POST to all running"] = await load.start_many(
            names, nodes=options.nodes
        )
        figures[f"restart of all {options.jobs} at once"] = await load.restart_many(names, nodes=options.nodes)
        after = rig.usage()
        figures["operator's CPU for both, s"] = [after.cpu_seconds - before.cpu_seconds]
        figures["operator's memory, MiB"] = [after.memory_mib]
        for program, seconds in (after.others - before.others).most_common():
            figures[f"  {program}'s CPU, s"] = [seconds]
        figures["a pass of reconcile at most"] = list((after.passes - before.passes).elements())
        requests = after.requests - before.requests
        figures["API requests per job, both"] = [requests.total() / len(names)]
        for title, count in requests.most_common():
            figures[f"  {title}"] = [count / len(names)]
        return figures


async def measure_floor(floor: Floor, options: argparse.Namespace, figures: Figures) -> None:
    """What the same objects take without an operator."""
    jobs = [f"floor-{number:03}" for number in range(options.jobs)]
    started = await floor.start_many(jobs, nodes=options.nodes)
    figures[f"floor: objects of {options.jobs} jobs made by hand, to all running"] = started
    figures["floor: their pods deleted and made again"] = await floor.restart_many(jobs, nodes=options.nodes)
    await floor.delete(jobs)


if __name__ == "__main__":
    sys.exit(main())
