"""`make chaos`: inject every fault of the matrix on a real cluster and render the results as a page."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from testing.cluster.fault_injection import Chaos
from testing.cluster.host.cgroups import is_cgroup_v2
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import ThrowawayCluster
from testing.faults.catalog.matrix import FAULTS
from testing.faults.expectation import Expectation
from testing.faults.expected.matrix import EXPECTATIONS
from testing.faults.matrix_page import ClusterSetup, render_page
from testing.faults.outcome import FaultRun, describe_failures, find_deviations
from testing.faults.run import run_fault
from testing.faults.training_job import copy_programs
from testing.processes.operator_stack import OperatorInstallation

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "operations" / "fault-matrix.md"
RUNS = PAGE.with_suffix(
    ".jsonl"
)  # results, stored next to the page so that results of several hosts and runs can be combined


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    selected_expectations = select_expectations(options.only)
    provider = ThrowawayProvider(ThrowawayCluster.from_name(options.cluster))
    installation = OperatorInstallation(provider)
    try:
        if not options.reuse:
            installation.prepare()
        copy_programs(installation)
        if not options.add:
            remove_earlier_runs(
                [expectation.name for expectation in selected_expectations], remove_all=not options.only
            )
        run_all_faults(
            installation, provider.chaos, [*selected_expectations] * options.runs, concurrency=options.at_once
        )
        runs = read_runs()
        PAGE.write_text(render_page(EXPECTATIONS, runs, describe_setup(provider.cluster, options.note)))
    finally:
        if not options.keep:
            provider.down()
    return compute_exit_code(selected_expectations, runs)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each fault (default 3)")
    parser.add_argument(
        "--only", default="", metavar="NAME,NAME", help="run only these faults; the runs of others are kept"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="faults to run at the same time, if they affect no other job (default 1)"
    )
    parser.add_argument("--reuse", action="store_true", help="use cluster, images and operator of an earlier --keep")
    parser.add_argument("--cluster", default="dev", help="name of the throwaway cluster (default dev)")
    parser.add_argument("--note", default="", help="a sentence for the page, such as other load on the host")
    parser.add_argument("--add", action="store_true", help="keep earlier runs of these faults, too")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    return parser.parse_args(arguments)


def select_expectations(selected_names: str) -> tuple[Expectation, ...]:
    """Return the expectations of all faults, or of the faults in a comma-separated list, in page order.

    Raises: SystemExit if a name is unknown.
    """
    expectations = {expectation.name: expectation for expectation in EXPECTATIONS}
    names = [name for name in selected_names.split(",") if name] or [*expectations]
    unknown_names = [name for name in names if name not in expectations]
    if unknown_names:
        raise SystemExit(f"chaos: unknown fault {', '.join(unknown_names)}; expected one of {', '.join(expectations)}")
    return tuple(expectation for name, expectation in expectations.items() if name in names)


def run_all_faults(
    installation: OperatorInstallation, chaos: Chaos, expectations: Sequence[Expectation], *, concurrency: int
) -> None:
    """Run the isolated faults concurrently, then the faults that affect other jobs one by one."""
    lock = Lock()

    def run_expected_fault(expectation: Expectation) -> None:
        fault = FAULTS[expectation.name]
        run, evidence = run_fault(
            installation, chaos, fault, expectation, concurrency=concurrency if fault.is_isolated else 1
        )
        with lock:
            append_run(run)
            print_run(expectation, run, evidence)

    with ThreadPoolExecutor(concurrency) as pool:
        list(
            pool.map(
                run_expected_fault,
                (expectation for expectation in expectations if FAULTS[expectation.name].is_isolated),
            )
        )
    for expectation in expectations:
        if not FAULTS[expectation.name].is_isolated:
            run_expected_fault(expectation)


def remove_earlier_runs(fault_names: Sequence[str], *, remove_all: bool) -> None:
    """Remove the earlier runs of these faults from the results file."""
    remaining_runs = [] if remove_all else [run for run in read_runs() if run.fault not in fault_names]
    RUNS.write_text("".join(f"{run.to_json()}\n" for run in remaining_runs))


def append_run(run: FaultRun) -> None:
    """Append the run to the results file at once, because the whole matrix takes an hour and may be interrupted."""
    with RUNS.open("a") as file:
        file.write(f"{run.to_json()}\n")


def read_runs() -> list[FaultRun]:
    return [FaultRun.from_json(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def print_run(expectation: Expectation, run: FaultRun, evidence: str) -> None:
    deviations = [*find_deviations(expectation, run), *([f"evidence: {evidence}"] if evidence else [])]
    observed = f"{describe_failures(run.failures)}; {run.phase}"
    figures = f"detected {run.detected_seconds}, again {run.again_seconds}, lost {run.steps_lost}"
    line = f"{time.strftime('%H:%M:%S')} {'WRONG' if deviations else 'ok':5} {expectation.name}: {observed}; {figures}"
    print("\n        ".join([line, *deviations]), flush=True)


def describe_setup(cluster: ThrowawayCluster, note: str) -> ClusterSetup:
    return ClusterSetup(
        kubernetes=cluster.state.versions.kubernetes,
        node_count=cluster.state.node_count,
        core_count=os.cpu_count() or 0,
        cgroup_version="version 2" if is_cgroup_v2() else "version 1",
        note=note,
    )


def compute_exit_code(expectations: Sequence[Expectation], runs: Sequence[FaultRun]) -> int:
    """Return 1 if a run deviates from its expectation or a fault was not injected, otherwise 0."""
    for expectation in expectations:
        runs_of_fault = [run for run in runs if run.fault == expectation.name]
        if not runs_of_fault or any(find_deviations(expectation, run) for run in runs_of_fault):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
