"""Runs examples by seed, and records their CPU time, outcomes and unforeseen exceptions."""

from __future__ import annotations

import signal
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

PROGRESS_INTERVAL_SECONDS = 60.0
MAX_LISTED = 20  # slow examples
CPU_LIMIT_SECONDS = 20.0  # of one example; the slowest ones need less than a second


@dataclass(frozen=True)
class Result:
    """Kind and outcome of an example, and the CPU seconds of each of its passes or texts."""

    kind: str
    outcome: str
    cpu_seconds: list[float]


Prepare = Callable[[int], Callable[[], Result]]  # builds the example of a seed; the returned function runs it


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
    """Results of consecutive seeds; `cpu_seconds` contains the time of each pass or text."""

    first_seed: int
    examples: int = 0
    slow_seeds: dict[int, float] = field(default_factory=dict)  # CPU seconds of the longest pass, by seed
    cpu_seconds: array[float] = field(default_factory=lambda: array("f"))
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, str, int], Failure] = field(default_factory=dict)
    wall_seconds: float = 0.0
    total_cpu_seconds: float = 0.0  # including the generation of the examples

    def record_failure(self, seed: int, error: Exception) -> None:
        """Group the exception with others of its type from the same line."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        key = (type(error).__name__, frame.filename, frame.lineno or 0)
        if key in self.failures:
            self.failures[key].count += 1
        else:
            self.failures[key] = Failure(seed, "".join(traceback.format_exception(error, limit=-12)))
            print(f"unforeseen exception with seed {seed}: {error!r:.200}", flush=True)

    def record(self, seed: int, result: Result, *, slow_seconds: float) -> None:
        """Record a result, and its seed if one of its passes was slow."""
        self.outcomes[result.kind, result.outcome] += 1
        self.cpu_seconds.extend(result.cpu_seconds)
        if (longest := max(result.cpu_seconds)) > slow_seconds:
            self.slow_seeds[seed] = longest

    def render(self, title: str, *, slow_seconds: float) -> str:
        """Return the number of passes or texts, their CPU times, slow seeds, and the number per kind and outcome."""
        ordered = sorted(self.cpu_seconds)
        if not ordered:
            return f"0 {title}"
        count = len(ordered)
        figures = {"p50": ordered[count // 2], "p99": ordered[count * 99 // 100], "max": ordered[-1]}
        times = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in figures.items())
        lines = [
            f"{count} {title} (seeds {self.first_seed} to {self.first_seed + self.examples - 1})"
            f" in {self.wall_seconds:.0f} s, {self.total_cpu_seconds:.0f} s of CPU",
            f"  CPU of one: {times}; {len(self.slow_seeds)} over {1000 * slow_seconds:.0f} ms",
            *(
                f"  seed {seed} took {1000 * seconds:.0f} ms"
                for seed, seconds in list(self.slow_seeds.items())[:MAX_LISTED]
            ),
            *(f"  {kind}: {outcome} {number}" for (kind, outcome), number in sorted(self.outcomes.items())),
        ]
        return "\n".join(lines)


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


def run_examples(prepare: Prepare, seeds: range, *, deadline: float, slow_seconds: float) -> Measurements:
    """Run one example per seed until the deadline, a time of the monotonic clock."""
    measurements = Measurements(seeds.start)
    started_at = reported_at = time.monotonic()
    cpu_before = time.thread_time()
    for number, seed in enumerate(seeds):
        run = prepare(seed)
        measurements.examples += 1
        try:
            with limit_cpu_time():
                result = run()
            measurements.record(seed, result, slow_seconds=slow_seconds)
        except Exception as error:  # whatever the operator does not foresee is the result of this program
            measurements.record_failure(seed, error)
        now = time.monotonic()
        if now - reported_at > PROGRESS_INTERVAL_SECONDS:
            reported_at = now
            print(f"{number + 1} of {len(seeds)}, {len(measurements.failures)} unforeseen exceptions", flush=True)
        if now > deadline:
            break
    measurements.wall_seconds = time.monotonic() - started_at
    measurements.total_cpu_seconds = time.thread_time() - cpu_before
    return measurements
