"""Tests of the figures, the disturbances and the log check of a soak test."""

import json
import random
from itertools import islice

from benchmarks.soak.checks import find_unexpected_error
from benchmarks.soak.disturbances import DISTURBANCES, Effect, Kind, Target, plan_disturbances
from benchmarks.soak.replicas import MemorySample
from benchmarks.soak.report import measure_memory, measure_restarts
from benchmarks.soak.state import SUSPENSION, SoakState


def build_lifetime(start: int, *, begin_mib: float, end_mib: float, seconds: int = 600) -> list[MemorySample]:
    """Return samples of a process, one every 10 s, whose memory changes linearly."""
    return [
        MemorySample(start + age, age, begin_mib + (end_mib - begin_mib) * age / seconds)
        for age in range(0, seconds + 1, 10)
    ]


def test_constant_memory_is_flat() -> None:
    trend = measure_memory([build_lifetime(600 * n, begin_mib=100, end_mib=102) for n in range(6)])

    assert trend is not None
    assert trend.is_flat
    assert 100 < trend.first_third < trend.maximum == 102
    assert len(trend.growths) == 6


def test_growth_of_one_process_is_not_flat() -> None:
    flat = [build_lifetime(600 * n, begin_mib=100, end_mib=100) for n in range(6)]
    trend = measure_memory([*flat, build_lifetime(1800, begin_mib=100, end_mib=180)])

    assert trend is not None
    assert not trend.is_flat


def test_growth_from_process_to_process_is_not_flat() -> None:
    trend = measure_memory([build_lifetime(600 * n, begin_mib=80 + 10 * n, end_mib=80 + 10 * n) for n in range(9)])

    assert trend is not None
    assert max(trend.growths) == 0
    assert not trend.is_flat


def test_restart_times_are_divided_by_overlap_with_a_disturbance() -> None:
    state = SoakState()
    state.failed_at = {("a", 0): 10.0, ("b", 0): 100.0, ("c", 0): 10.0, ("d", 0): 10.0}
    state.running_at = {("a", 1): 12.0, ("b", 1): 130.0, ("c", 1): 90.0}  # d never ran again
    state.causes["c", 0].append(SUSPENSION)
    effect = Effect("pause leader 25 s", started_at=95.0, ended_at=125.0, until_ready=1.0, until_pod=26.0)

    assert measure_restarts(state, [effect]) == ([2.0], [30.0])


def test_disturbances_take_turns_and_each_one_occurs() -> None:
    kinds = tuple(Kind)
    disturbances = list(islice(plan_disturbances(kinds, random.Random(1)), 36))

    assert [disturbance.kind for disturbance in disturbances] == [*kinds] * 12
    assert set(disturbances) == {disturbance for same in DISTURBANCES.values() for disturbance in same}
    assert len({str(disturbance) for disturbance in disturbances}) == 16
    assert {d.target for d in disturbances if d.kind is Kind.KILL} == set(Target)


def test_tracebacks_in_a_log_are_unexpected_errors() -> None:
    record = {"level": "error", "message": "pass failed", "exception": "Traceback (most recent call last)\nKeyError: 1"}

    assert find_unexpected_error(json.dumps(record)) == "KeyError: 1"
    assert find_unexpected_error(json.dumps({"level": "warning", "message": "lease: conflict"})) == ""
    assert find_unexpected_error("Traceback (most recent call last):") != ""
