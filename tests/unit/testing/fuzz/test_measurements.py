"""Tests that the fuzz runner reports unforeseen exceptions, slow examples and their seeds."""

import time
from collections.abc import Callable

from testing.fuzz.measurements import Measurements, explain_slow_example, run_examples

FOREVER = float("inf")
Run = Callable[[], tuple[str, str]]


def succeed() -> tuple[str, str]:
    return "job", "Running"


def raise_for_odd_seeds(seed: int) -> Run:
    def fail() -> tuple[str, str]:
        raise OverflowError(f"seed {seed}")

    return fail if seed % 2 else succeed


def burn_cpu_for_seed_7(seed: int) -> Run:
    def burn() -> tuple[str, str]:
        deadline = time.thread_time() + 0.02
        while time.thread_time() < deadline:
            pass
        return "job", "slow"

    return burn if seed == 7 else succeed


def test_exceptions_of_one_line_are_one_failure_with_its_first_seed() -> None:
    measurements = run_examples(raise_for_odd_seeds, range(10, 20), deadline=FOREVER)

    [failure] = measurements.failures.values()
    assert (failure.seed, failure.count) == (11, 5)
    assert "OverflowError: seed 11" in failure.render()
    assert "fail" in failure.render()
    assert measurements.outcomes == {("job", "Running"): 5}


def test_slow_examples_are_listed_by_seed_and_explained() -> None:
    measurements = run_examples(burn_cpu_for_seed_7, range(5, 10), deadline=FOREVER)
    [(seed, seconds)] = measurements.list_slow(0.015)

    assert seed == 7
    assert "1 over 15 ms" in measurements.render("passes", slow_seconds=0.015)
    explanation = explain_slow_example(burn_cpu_for_seed_7, seed, seconds)
    assert explanation.startswith("seed 7 (job: slow) took ")
    assert "burn (test_measurements.py:" in explanation


def test_the_deadline_ends_the_examples() -> None:
    measurements = run_examples(raise_for_odd_seeds, range(100), deadline=time.monotonic())

    assert len(measurements.cpu_seconds) == 1


def test_figures_of_no_examples_are_rendered() -> None:
    assert Measurements(0).render("texts", slow_seconds=0.2) == "0 texts"
