"""Whole passes over random pods, jobs and messages, and the parsers of texts from pods (`make fuzz` runs more)."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.fuzz.cases import CASE_BUILDERS, build_case, build_message, build_response
from testing.fuzz.passes import parse_text, run_case

EXAMPLES = 600
DECIDED = ("Running", "Restarting", "Starting")
fuzzing = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=tuple(HealthCheck))
seeds = st.integers(0, 2**63)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as event_loop_runner:
        yield event_loop_runner


@fuzzing
@given(seed=seeds)
def test_no_pod_or_job_raises_an_unforeseen_error(runner: asyncio.Runner, seed: int) -> None:
    run_case(build_case(seed), runner)


@settings(fuzzing, max_examples=EXAMPLES * 5)
@given(seed=seeds)
def test_no_text_of_a_pod_raises_in_a_parser(seed: int) -> None:
    source = random.Random(seed)

    parse_text("message", build_message(source))
    parse_text("response", build_response(source))


def test_cases_of_every_kind_reach_decisions(runner: asyncio.Runner) -> None:
    """If nearly all cases were ignored as unreadable, the passes would test nothing."""
    cases = [build_case(seed) for seed in range(200)]
    decided = Counter(case.kind for case in cases if run_case(case, runner)[0] in DECIDED)

    assert decided.keys() == CASE_BUILDERS.keys()
    assert decided.total() > 100


def test_a_seed_determines_its_case() -> None:
    assert all(build_case(seed) == build_case(seed) for seed in range(50))
