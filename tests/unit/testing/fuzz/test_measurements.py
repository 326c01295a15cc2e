"""Tests that the fuzz runner reports unforeseen exceptions, slow examples and their seeds."""

import time
from collections.abc import Callable

import pytest

from testing.fuzz.measurements import (
    CpuTimeExceeded,
    Result,
    limit_cpu_time,
    run_examples,
)

FOREVER = float("inf")
SLOW_SECONDS = 0.015
Run = Callable[[], Result]


def succeed() -> Result:
    return Result("job", "Running", [0.001, 0.002])


def raise_for_odd_seeds(seed: int) -> Run:
    def fail() -> Result:
        raise OverflowError(f"seed {seed}")

    return fail if seed % 2 else succeed


def burn_cpu_for_seed_7(seed: int) -> Run:
    def burn() -> Result:
        started_at = time.thread_time()
        while time.thread_time() < started_at + 0.02:
            pass
        return Result("job", "slow", [0.001, time.thread_time() - started_at])

    return burn if seed == 7 else succeed


def test_exceptions_of_one_line_are_one_failure_with_its_first_seed() -> None:
    measurements = run_examples(raise_for_odd_seeds, range(10, 20), deadline=FOREVER, slow_seconds=SLOW_SECONDS)

    [failure] = measurements.failures.values()
    assert (failure.seed, failure.count) == (11, 5)
    assert "OverflowError: seed 11" in failure.render()
    assert "fail" in failure.render()
    assert measurements.outcomes == {("job", "Running"): 5}


def test_slow_examples_are_listed_by_seed() -> None:
    measurements = run_examples(burn_cpu_for_seed_7, range(5, 10), deadline=FOREVER, slow_seconds=SLOW_SECONDS)
    [(seed, seconds)] = measurements.slow_seeds.items()

    assert seed == 7
    assert "10 passes (seeds 5 to 9)" in measurements.render("passes", slow_seconds=SLOW_SECONDS)
    assert "1 over 15 ms" in measurements.render("passes", slow_seconds=SLOW_SECONDS)
    assert f"seed 7 took {1000 * seconds:.0f} ms" in measurements.render("passes", slow_seconds=SLOW_SECONDS)


def test_example_that_does_not_end_is_interrupted() -> None:
    def run_forever() -> None:
        with limit_cpu_time(0.05):
            while True:
                pass

    with pytest.raises(CpuTimeExceeded):
        run_forever()
