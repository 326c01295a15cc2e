"""Entry point of `make fuzz`: reconcile passes and parsers on random objects and texts that tenants can write.

Every input is determined by its seed. The exit code is 1 if an exception was unforeseen or a status too large.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable
from functools import partial

from testing.fuzz.cases import build_case, build_message, build_response
from testing.fuzz.measurements import Result, run_examples
from testing.fuzz.passes import parse_text, run_case

SLOW_SECONDS = 0.2
PASSES_SHARE = 0.85  # of the limit in minutes; parsing five times as many texts takes an eighth of the time
PARSERS: dict[str, Callable[[random.Random], str]] = {"message": build_message, "response": build_response}


def main() -> int:
    """Run the examples, print the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=200_000, help="cases of whole passes (default 200000)")
    parser.add_argument("--texts", type=int, default=None, help="texts for the parsers (default: 5 times the passes)")
    parser.add_argument("--seed", type=int, default=0, help="first seed; the seeds are consecutive (default 0)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--replay", type=int, help="run only the case of this seed, and print it if it fails")
    options = parser.parse_args()
    texts = 5 * options.passes if options.texts is None else options.texts
    started_at, seconds = time.monotonic(), 60 * options.minutes
    with asyncio.Runner() as runner:
        prepare_passes = partial(_prepare_passes, runner=runner)
        run = partial(run_examples, slow_seconds=SLOW_SECONDS)
        if options.replay is not None:
            print(build_case(options.replay))
            print(prepare_passes(options.replay)())
            return 0
        seeds = range(options.seed, options.seed + options.passes)
        passes = run(prepare_passes, seeds, deadline=started_at + PASSES_SHARE * seconds)
        seeds = range(options.seed, options.seed + texts)
        parsed = run(_prepare_text, seeds, deadline=started_at + seconds)
        for title, measurements in (("passes", passes), ("texts", parsed)):
            print(measurements.render(title, slow_seconds=SLOW_SECONDS))
    failures = (*passes.failures.values(), *parsed.failures.values())
    for failure in failures:
        print(failure.render())
    print(f"{len(failures)} unforeseen exceptions" if failures else "0 unforeseen exceptions")
    return 1 if failures else 0


def _prepare_passes(seed: int, *, runner: asyncio.Runner) -> Callable[[], Result]:
    case = build_case(seed)

    def run() -> Result:
        outcome, cpu_seconds = run_case(case, runner)
        return Result(case.kind, outcome, cpu_seconds)

    return run


def _prepare_text(seed: int) -> Callable[[], Result]:
    source = random.Random(seed)
    kind = source.choice(tuple(PARSERS))
    text = PARSERS[kind](source)

    def run() -> Result:
        started_at = time.thread_time()
        outcome = parse_text(kind, text)
        return Result(kind, outcome, [time.thread_time() - started_at])

    return run


if __name__ == "__main__":
    sys.exit(main())
