"""Entry point of `make bench`, which compares the operator with others on a real API server, with pods that kwok runs.

The floor is the same objects and status writes by a plain asynchronous client. With `--peer`, Kubeflow Trainer and
JobSet run jobs of the same size. All take turns on one cluster; only one of them runs at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from contextlib import nullcontext

from benchmarks.kubeflow.managers import install_managers
from benchmarks.load.contender import LoadContender, LoadRig
from benchmarks.load.figures import summarise_turn
from benchmarks.load.floor_contender import FloorContender
from benchmarks.load.kubeflow_contender import KubeflowContender
from benchmarks.load.operator_contender import OperatorContender
from benchmarks.load.report import render_comparison, render_passes, render_requests
from benchmarks.load.turn import LoadSize, TurnResult, run_turn
from benchmarks.rig import create_operator_log, start_fake_cluster
from testing.cluster.controller_managers import InstalledManager

TurnResults = dict[str, list[TurnResult]]  # results of each round, by title of the contender


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the operator on a real API server with kwok pods.")
    parser.add_argument("--jobs", type=int, default=100, help="jobs started at once (default 100)")
    parser.add_argument("--nodes", type=int, default=4, help="nodes per job (default 4)")
    parser.add_argument("--singles", type=int, default=5, help="single jobs per turn (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--no-floor", action="store_true", help="skip the floor")
    parser.add_argument("--peer", action="store_true", help="also measure Kubeflow Trainer and JobSet, built first")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    size = LoadSize(options.jobs, options.nodes, options.singles)
    results = asyncio.run(run_benchmark(options, size))
    figures = {title: [summarise_turn(turn, size) for turn in turns] for title, turns in results.items()}
    own_turns = results[OperatorContender.title]
    tables = (
        render_comparison(figures, own_title=OperatorContender.title),
        render_requests(own_turns, jobs=size.jobs),
        render_passes(own_turns),
    )
    print(*tables, sep="\n\n")
    return 0


async def run_benchmark(options: argparse.Namespace, size: LoadSize) -> TurnResults:
    """Run all turns; each round begins with another contender."""
    results: TurnResults = defaultdict(list)
    async with start_fake_cluster("bench", keep_cluster=options.keep) as (cluster, api):
        rig = LoadRig(cluster, api)
        with install_managers(cluster) if options.peer else nullcontext(()) as managers:
            contenders = build_contenders(rig, managers, has_floor=not options.no_floor)
            for number in range(options.rounds):
                first = number % len(contenders)
                for contender in (*contenders[first:], *contenders[:first]):
                    print(f"round {number + 1} of {options.rounds}: {contender.title}", file=sys.stderr)
                    prefix = f"{contender.title.lower()}-{number}"
                    results[contender.title].append(await run_turn(rig, contender, size=size, prefix=prefix))
    return {contender.title: results[contender.title] for contender in contenders}


def build_contenders(
    rig: LoadRig, managers: tuple[InstalledManager, ...], *, has_floor: bool
) -> tuple[LoadContender, ...]:
    """Return the contenders, none of which runs."""
    for manager in managers:
        manager.stop()
    return (
        OperatorContender(rig, create_operator_log()),
        *((FloorContender(rig),) if has_floor else ()),
        *((KubeflowContender(rig, managers),) if managers else ()),
    )


if __name__ == "__main__":
    sys.exit(main())
