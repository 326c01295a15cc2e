"""Command line of `make reference`, which compares random combinations and prints shrunk differences as job files."""

import argparse
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from testing.reference.combination import Combination, Layout, count_values, draw
from testing.reference.compare import BOUNDS, Report, check, find_largest
from testing.reference.launch import run_trainer
from testing.reference.model import find_build_problem
from testing.reference.shrink import format_job, shrink

CELLS_PER_LAUNCH = 24
# of AdamW for all types: the gradients of some, such as ctrl and gemma4_unified_text, are so small that with 1e-6 their
# rounding moves the logits by 1e-4; with 1e-3 the difference is below 1e-5
TYPES_EPSILON = 1e-3
INCOMPARABLE = {
    "phimoe": "it draws experts at random while it trains",
    "youtu": "transformers sets the embedding of the pad token to 0 when it loads a model",
}


def main() -> int:
    """Run the search, and exit with 1 if a training differed from the reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="first seed; the seeds are consecutive (default: random)")
    parser.add_argument("--minutes", type=float, default=10, help="start no launch after this time (default 10)")
    parser.add_argument("--ranks", type=int, default=4, help="largest number of ranks (default 4)")
    parser.add_argument("--types", nargs="*", help="instead, train these causal types of transformers (default: all)")
    options = parser.parse_args()
    prepare()
    started_at = time.monotonic()
    reports: list[Report] = []
    if options.types is not None:
        reports = check_types(options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    else:
        first = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
        print(f"combinations of the seeds from {first} on", flush=True)
        while time.monotonic() - started_at < 60 * options.minutes:
            seeds = range(first + len(reports), first + len(reports) + CELLS_PER_LAUNCH)
            reports += check_all([draw(seed, max_ranks=options.ranks) for seed in seeds])
            print(f"{len(reports)} combinations in {time.monotonic() - started_at:.0f} s", flush=True)
    print_summary(reports)
    different = [report for report in reports if report.differences]
    for report in different:
        explain(report)
    print(f"{len(different)} of {len(reports)} combinations differ from the reference")
    return 1 if different else 0


def check_types(types: Sequence[str]) -> list[Report]:
    """Compare plain, packed and preference training of each type; print what is not compared, and what is refused."""
    combinations: list[Combination] = []
    for model_type in types:
        if problem := INCOMPARABLE.get(model_type) or find_build_problem(model_type):
            print(f"{model_type}: not compared ({problem})", flush=True)
            continue
        plain = Combination(family=model_type, layout=Layout(1, 2, 2), epsilon=TYPES_EPSILON)
        combinations += (plain, replace(plain, packing=True, max_length=150), replace(plain, method="dpo"))
    reports: list[Report] = []
    for start in range(0, len(combinations), CELLS_PER_LAUNCH):
        for report in check_all(combinations[start : start + CELLS_PER_LAUNCH]):
            changes = report.options.describe_changes()
            if report.problems and report.problems[0].startswith("InvalidSpec"):
                print(f"refused {changes}: {report.problems[0]}", flush=True)
            else:
                print(f"{'different' if report.differences else 'equal'} {changes}", flush=True)
                reports.append(report)
    return reports


def prepare() -> None:
    """Use one thread, because several processes share the cores, and silence the libraries."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def check_all(combinations: Sequence[Combination]) -> list[Report]:
    """Train and compare combinations, which share launches; if a launch fails, train each in one of its own."""
    named = {str(number): each for number, each in enumerate(combinations)}
    with tempfile.TemporaryDirectory(prefix="reference-") as folder:
        try:
            return [check(run) for run in run_trainer(named, Path(folder)).values()]
        except (AssertionError, subprocess.TimeoutExpired) as error:  # of the launch, with the end of its log
            if len(combinations) == 1:
                return [Report(combinations[0], problems=(f"the launch failed: {error}",))]
    return [report for each in combinations for report in check_all([each])]


def find_different(combinations: Sequence[Combination]) -> list[Combination]:
    """Return those of the combinations whose trainings differ from the reference."""
    return [report.options for report in check_all(combinations) if report.differences]


def print_summary(reports: Sequence[Report]) -> None:
    """Print the number of combinations by value of each option, and the largest difference of each quantity."""
    for value, count in sorted(count_values(report.options for report in reports).items()):
        print(f"  {value}: {count} combinations")
    for dtype in BOUNDS:
        largest = find_largest(report for report in reports if report.options.dtype == dtype)
        for quantity, relative in sorted(largest.items()):
            print(f"  {quantity} in {dtype}: largest relative difference {relative:.1e}")


def explain(report: Report) -> None:
    """Print a difference, the smallest combination that has one, and its job file with the files that it names."""
    print(f"\nseed {report.options.seed}, {report.options.describe_changes()}: {report.differences[0]}", flush=True)
    smallest = shrink(report.options, find_different)
    print(f"shrunk to {smallest.describe_changes()}")
    for difference in check_all([smallest])[0].differences:
        print(f"  {difference}")
    print(format_job(smallest, Path(tempfile.mkdtemp(prefix="difference-"))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
