"""Tests that the fuzz runner counts unforeseen exceptions, prints their seeds and interrupts endless examples."""

import pytest

from testing.fuzz.__main__ import CpuTimeExceeded, limit_cpu_time, run_examples


def test_unforeseen_exceptions_are_counted_and_printed_with_their_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    def run(seed: int) -> float:
        if seed % 2:
            raise OverflowError("too large")
        return 0.3 if seed == 8 else 0.001

    assert run_examples("passes", run, range(5, 10), deadline=float("inf")) == 3

    output = capsys.readouterr().out
    assert "unforeseen exception with seed 7:\n" in output
    assert "OverflowError: too large" in output
    assert "seed 8 took 300 ms" in output
    assert output.endswith("5 passes, 3 unforeseen exceptions; the slowest took 300 ms of CPU\n")


def test_example_that_does_not_end_is_interrupted() -> None:
    def run_forever() -> None:
        with limit_cpu_time(0.05):
            while True:
                pass

    with pytest.raises(CpuTimeExceeded):
        run_forever()
