"""`make chaos`: every fault of the matrix on a real cluster, and docs/operations/fault-matrix.md from what was seen."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from testing.cluster.fault_injection import Chaos
from testing.cluster.host.cgroups import is_unified
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import ThrowawayCluster
from testing.faults.catalog.matrix import FAULTS
from testing.faults.expectation import Expectation
from testing.faults.expectations import EXPECTATIONS
from testing.faults.matrix_page import Setup, render_page
from testing.faults.outcome import Run, describe_failures, deviations
from testing.faults.run import run_fault
from testing.processes.operator_stack import Stack

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "operations" / "fault-matrix.md"
RUNS = PAGE.with_suffix(".jsonl")  # beside the page, so that what was seen elsewhere and before can be added to
INJECT = REPOSITORY / "testing" / "fakes" / "inject"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    chosen = choose(options.only)
    provider = ThrowawayProvider(ThrowawayCluster.named())
    stack = Stack(provider)
    try:
        stack.prepare()
        bring_programs(stack)
        if not options.add:
            forget([expected.name for expected in chosen], all_of_them=not options.only)
        run_all(stack, provider.chaos, [*chosen] * options.runs, at_once=options.at_once)
        runs = read_runs()
        PAGE.write_text(render_page(EXPECTATIONS, runs, describe(provider.cluster, options.note)))
    finally:
        if not options.keep:
            provider.down()
    return exit_code(chosen, runs)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each fault (default 3)")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these faults; what was seen of others is kept")
    parser.add_argument("--at-once", type=int, default=1, help="of those that touch no other job (default 1)")
    parser.add_argument("--note", default="", help="a sentence for the page, such as what else the machine did")
    parser.add_argument("--add", action="store_true", help="keep what was seen of them before, too")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    return parser.parse_args(arguments)


def choose(only: str) -> tuple[Expectation, ...]:
    """In the order of the table; a SystemExit names what there is no such fault."""
    known = {expected.name: expected for expected in EXPECTATIONS}
    wanted = [name for name in only.split(",") if name] or [*known]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"chaos: no fault {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(expected for name, expected in known.items() if name in wanted)


def run_all(stack: Stack, chaos: Chaos, wanted: Sequence[Expectation], *, at_once: int) -> None:
    """First those that can share the cluster, then those that need it for themselves."""
    lock = Lock()

    def run_one(expected: Expectation) -> None:
        fault = FAULTS[expected.name]
        run, evidence = run_fault(stack, chaos, fault, expected, at_once=at_once if fault.spares_others else 1)
        with lock:
            keep(run)
            tell(expected, run, evidence)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run_one, (expected for expected in wanted if FAULTS[expected.name].spares_others)))
    for expected in wanted:
        if not FAULTS[expected.name].spares_others:
            run_one(expected)


def bring_programs(stack: Stack) -> None:
    """To where the pods see them."""
    folder = stack.folder("datasets") / "chaos"
    (folder / "inject").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parent / "training_program.py", folder / "program.py")
    shutil.copy(INJECT / "sitecustomize.py", folder / "inject")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def forget(faults: Sequence[str], *, all_of_them: bool) -> None:
    """Runs of before that are about to be made again."""
    kept = [] if all_of_them else [run for run in read_runs() if run.fault not in faults]
    RUNS.write_text("".join(f"{run.to_json()}\n" for run in kept))


def keep(run: Run) -> None:
    """At once: a matrix takes an hour, and may be interrupted."""
    with RUNS.open("a") as file:
        file.write(f"{run.to_json()}\n")


def read_runs() -> list[Run]:
    return [Run.from_json(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def tell(expected: Expectation, run: Run, evidence: str) -> None:
    wrong = [*deviations(expected, run), *([f"kept: {evidence}"] if evidence else [])]
    seen = f"{describe_failures(run.failures)}; {run.phase}"
    figures = f"noticed {run.detected_seconds}, again {run.again_seconds}, lost {run.steps_lost}"
    line = f"{time.strftime('%H:%M:%S')} {'WRONG' if wrong else 'ok':5} {expected.name}: {seen}; {figures}"
    print("\n        ".join([line, *wrong]), flush=True)


def describe(cluster: ThrowawayCluster, note: str) -> Setup:
    return Setup(
        kubernetes=cluster.state.versions.kubernetes,
        nodes=cluster.state.node_count,
        cores=os.cpu_count() or 0,
        cgroups="version 2" if is_unified() else "version 1",
        note=note,
    )


def exit_code(chosen: Sequence[Expectation], runs: Sequence[Run]) -> int:
    """1 if a run was not as expected, or a fault was not run."""
    for expected in chosen:
        own = [run for run in runs if run.fault == expected.name]
        if not own or any(deviations(expected, run) for run in own):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
