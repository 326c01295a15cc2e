"""Tests of the clock that ignores short jumps of the wall clock."""

from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from finetune_operator.manager.stable_clock import StableClock
from testing.builders.jobs import NOW

DAY = timedelta(days=1)


@dataclass
class Clocks:
    """Clocks of a simulated machine; `offset` is the error of the wall clock."""

    seconds: float = 1000.0
    offset: timedelta = timedelta()

    def read_true_time(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def build(self) -> StableClock:
        return StableClock(read_wall=lambda: self.read_true_time() + self.offset, read_monotonic=lambda: self.seconds)


@pytest.mark.parametrize("offset", [DAY, -DAY])
def test_a_jump_that_is_corrected_within_two_minutes_is_ignored(offset: timedelta) -> None:
    clocks = Clocks()
    clock = clocks.build()

    clocks.offset = offset
    for _ in range(11):
        clocks.seconds += 10
        assert clock.now() == clocks.read_true_time()
    clocks.offset = timedelta()
    clocks.seconds += 3600

    assert clock.now() == clocks.read_true_time()


@pytest.mark.parametrize("offset", [DAY, -DAY])
def test_a_jump_that_lasts_is_accepted(offset: timedelta) -> None:
    clocks = Clocks()
    clock = clocks.build()

    clocks.offset = offset
    clock.now()
    clocks.seconds += 121

    assert clock.now() == clocks.read_true_time() + offset
    clocks.seconds += 1
    assert clock.now() == clocks.read_true_time() + offset


def test_small_corrections_apply_at_once() -> None:
    clocks = Clocks()
    clock = clocks.build()

    for _ in range(10):
        clocks.offset += timedelta(seconds=50)
        clocks.seconds += 1
        assert clock.now() == clocks.read_true_time() + clocks.offset


def test_a_second_jump_has_to_last_as_well() -> None:
    clocks = Clocks()
    clock = clocks.build()
    clocks.offset = DAY
    clock.now()
    clocks.seconds += 100
    clocks.offset = timedelta()
    clock.now()
    clocks.offset = DAY
    clocks.seconds += 100

    assert clock.now() == clocks.read_true_time()
