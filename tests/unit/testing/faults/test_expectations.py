"""Tests of the fault catalog and its expectations."""

from collections import Counter

import pytest

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Fault
from testing.faults.catalog.matrix import FAULTS
from testing.faults.expectation import Expectation, expect_restart
from testing.faults.expected.matrix import EXPECTATIONS
from testing.faults.scenarios import SCENARIOS


def test_every_fault_has_exactly_one_expectation() -> None:
    names = Counter(expectation.name for expectation in EXPECTATIONS)

    assert names.keys() == FAULTS.keys()
    assert set(names.values()) == {1}
    assert len(names) >= 25


def test_every_scenario_is_covered_by_faults_of_the_matrix() -> None:
    covered = {name for scenario in SCENARIOS for name in scenario.faults}

    assert len(SCENARIOS) == 20
    assert covered <= FAULTS.keys()
    assert all(scenario.faults for scenario in SCENARIOS)


@pytest.mark.parametrize(
    ("reason", "fault", "counted_restarts"),
    [
        pytest.param(Reason.RANK_KILLED, Fault.TRANSIENT, 1, id="transient"),
        pytest.param(Reason.RANK_CRASHED, Fault.UNKNOWN, 1, id="unknown"),
        pytest.param(Reason.NODE_LOST, Fault.INFRASTRUCTURE, 0, id="infrastructure"),
        pytest.param(Reason.PREEMPTED, Fault.PREEMPTION, 0, id="preemption"),
    ],
)
def test_only_restarts_not_caused_by_the_cluster_count_against_the_budget(
    reason: Reason, fault: Fault, counted_restarts: int
) -> None:
    expectation = Expectation("one", "", expect_restart(reason))

    assert [failure.fault for failure in expectation.failures] == [fault]
    assert (expectation.restarts, expectation.counted_restarts) == (1, counted_restarts)
