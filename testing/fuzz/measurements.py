"""Runs examples by seed, and records their CPU time, outcomes and unforeseen exceptions."""

from __future__ import annotations

import cProfile
import pstats
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROGRESS_INTERVAL_SECONDS = 60.0
REPETITIONS = 3  # of a slow example
EXPLAINED_FUNCTIONS = 4

# Builds the example of a seed; the returned function runs it and returns its kind and outcome.
Prepare = Callable[[int], Callable[[], tuple[str, str]]]


@dataclass
class Failure:
    """Unforeseen exceptions of one type that were raised by one line, with the first seed and its traceback."""

    seed: int
    text: str
    count: int = 1

    def render(self) -> str:
        return f"UNFORESEEN in {self.count} examples, first with seed {self.seed}:\n{self.text}"


@dataclass
class Measurements:
    """Results of a range of seeds; `cpu_seconds` contains the time of each example, in the order of the seeds."""

    first_seed: int
    cpu_seconds: array[float] = field(default_factory=lambda: array("f"))
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, str, int], Failure] = field(default_factory=dict)
    wall_seconds: float = 0.0

    def record_failure(self, seed: int, error: Exception) -> None:
        """Group the exception with others of its type from the same line."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        key = (type(error).__name__, frame.filename, frame.lineno or 0)
        if key in self.failures:
            self.failures[key].count += 1
        else:
            self.failures[key] = Failure(seed, "".join(traceback.format_exception(error, limit=-12)))

    def list_slow(self, seconds: float) -> list[tuple[int, float]]:
        """Return seed and CPU seconds of each example that took longer, the slowest first."""
        slow = [(self.first_seed + number, taken) for number, taken in enumerate(self.cpu_seconds) if taken > seconds]
        return sorted(slow, key=lambda example: -example[1])

    def render(self, title: str, *, slow_seconds: float) -> str:
        """Return the number of examples, their CPU time, and the number per kind and outcome."""
        ordered = sorted(self.cpu_seconds)
        if not ordered:
            return f"0 {title}"
        count = len(ordered)
        figures = {"p50": ordered[count // 2], "p99": ordered[count * 99 // 100], "max": ordered[-1]}
        times = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in figures.items())
        lines = [
            f"{count} {title} (seeds {self.first_seed} to {self.first_seed + count - 1}) in {self.wall_seconds:.0f} s:"
            f" CPU {times}, {len(self.list_slow(slow_seconds))} over {1000 * slow_seconds:.0f} ms",
            *(f"  {kind}: {outcome} {number}" for (kind, outcome), number in sorted(self.outcomes.items())),
        ]
        return "\n".join(lines)


def run_examples(prepare: Prepare, seeds: range, *, deadline: float) -> Measurements:
    """Run one example per seed until the deadline, a time of the monotonic clock; only the run itself is timed."""
    measurements = Measurements(seeds.start)
    started_at = reported_at = time.monotonic()
    for number, seed in enumerate(seeds):
        run = prepare(seed)
        cpu_before = time.thread_time()
        try:
            measurements.outcomes[run()] += 1
        except Exception as error:  # whatever the operator does not foresee is the result of this program
            measurements.record_failure(seed, error)
        measurements.cpu_seconds.append(time.thread_time() - cpu_before)
        now = time.monotonic()
        if now - reported_at > PROGRESS_INTERVAL_SECONDS:
            reported_at = now
            print(f"{number + 1} of {len(seeds)}, {len(measurements.failures)} unforeseen exceptions", flush=True)
        if now > deadline:
            break
    measurements.wall_seconds = time.monotonic() - started_at
    return measurements


def explain_slow_example(prepare: Prepare, seed: int, seconds: float) -> str:
    """Repeat a slow example; return its shortest CPU time and the functions that use most of it."""
    repeated = []
    for _ in range(REPETITIONS):
        run = prepare(seed)
        cpu_before = time.thread_time()
        kind, outcome = run()
        repeated.append(time.thread_time() - cpu_before)
    run = prepare(seed)
    profile = cProfile.Profile()
    profile.runcall(run)
    statistics = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    by_own_time = sorted(statistics.items(), key=lambda item: -item[1][2])[:EXPLAINED_FUNCTIONS]
    functions = ", ".join(
        f"{function} ({Path(file).name}:{line}) {calls} calls {1000 * own:.0f} ms"
        for (file, line, function), (_, calls, own, _, _) in by_own_time
    )
    return (
        f"seed {seed} ({kind}: {outcome}) took {1000 * seconds:.0f} ms of CPU,"
        f" repeated {1000 * min(repeated):.0f} ms; in the profile: {functions}"
    )
