"""Entry point of `make fuzz`: reconcile passes and parsers on random objects and texts that tenants can write.

Every input is determined by its seed. The exit code is 1 if an exception was unforeseen or a status too large.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from testing.fuzz.cases import build_case, build_message, build_response
from testing.fuzz.passes import parse_text, run_case

SLOW_SECONDS = 0.2  # of CPU
CPU_LIMIT_SECONDS = 20.0  # of one example; the slowest ones need less than a second
PASSES_SHARE = 0.85  # of the limit in minutes; parsing five times as many texts takes an eighth of the time
MAX_FAILURES = 20
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

        def run_passes(seed: int) -> float:
            return max(run_case(build_case(seed), runner)[1])

        if options.replay is not None:
            print(build_case(options.replay))
            print(f"{run_passes(options.replay):.3f} s of CPU")
            return 0
        seeds = range(options.seed, options.seed + options.passes)
        failures = run_examples("passes", run_passes, seeds, deadline=started_at + PASSES_SHARE * seconds)
        seeds = range(options.seed, options.seed + texts)
        failures += run_examples("texts", run_parser, seeds, deadline=started_at + seconds)
    return 1 if failures else 0


def run_parser(seed: int) -> float:
    """Parse the text of this seed and return the CPU seconds."""
    source = random.Random(seed)
    kind = source.choice(tuple(PARSERS))
    text = PARSERS[kind](source)
    started_at = time.thread_time()
    parse_text(kind, text)
    return time.thread_time() - started_at


def run_examples(title: str, run: Callable[[int], float], seeds: range, *, deadline: float) -> int:
    """Run one example per seed until the deadline, a time of the monotonic clock; return the number of failures.

    run: runs the example of a seed, and returns its CPU seconds.
    """
    slowest, count, failures = 0.0, 0, 0
    for seed in seeds:
        count += 1
        try:
            with limit_cpu_time():
                cpu_seconds = run(seed)
        except Exception:  # whatever the operator does not foresee is the result of this program
            failures += 1
            print(f"unforeseen exception with seed {seed}:\n{traceback.format_exc(limit=-12)}", flush=True)
        else:
            slowest = max(slowest, cpu_seconds)
            if cpu_seconds > SLOW_SECONDS:
                print(f"seed {seed} took {1000 * cpu_seconds:.0f} ms of CPU", flush=True)
        if failures == MAX_FAILURES or time.monotonic() > deadline:
            break
    print(f"{count} {title}, {failures} unforeseen exceptions; the slowest took {1000 * slowest:.0f} ms of CPU")
    return failures


class CpuTimeExceeded(Exception):
    """Raised in an example that does not end."""


@contextmanager
def limit_cpu_time(seconds: float = CPU_LIMIT_SECONDS) -> Iterator[None]:
    """Raise CpuTimeExceeded in the main thread after this much CPU time."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise CpuTimeExceeded(f"more than {seconds:g} s of CPU")

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


if __name__ == "__main__":
    sys.exit(main())
