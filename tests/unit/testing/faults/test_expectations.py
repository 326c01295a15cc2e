"""Tests of the list of faults and of the expectations."""

from collections import Counter

import pytest

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Fault
from testing.faults.__main__ import select_expectations
from testing.faults.catalog.matrix import FAULTS
from testing.faults.expectation import Expectation, failed, repaired, restarted
from testing.faults.expectations import EXPECTATIONS


def test_every_expectation_has_its_fault_and_every_fault_its_expectation() -> None:
    names = Counter(expected.name for expected in EXPECTATIONS)

    assert names.keys() == FAULTS.keys()
    assert set(names.values()) == {1}
    assert len(names) >= 25


def test_the_expected_phase_follows_from_the_last_failure() -> None:
    assert Expectation("none", "").phase == "Complete"
    assert Expectation("repaired", "", repaired(Reason.CUDA_OUT_OF_MEMORY)).phase == "Complete"
    assert Expectation("twice", "", (*restarted(Reason.HANG), *failed(Reason.DATASET_ERROR))).phase == "Failed"


@pytest.mark.parametrize(
    ("reason", "fault", "counted"),
    [
        pytest.param(Reason.RANK_KILLED, Fault.TRANSIENT, 1, id="transient"),
        pytest.param(Reason.RANK_CRASHED, Fault.UNKNOWN, 1, id="unknown"),
        pytest.param(Reason.NODE_LOST, Fault.INFRASTRUCTURE, 0, id="infrastructure"),
        pytest.param(Reason.PREEMPTED, Fault.PREEMPTION, 0, id="preemption"),
    ],
)
def test_restarts_caused_by_the_cluster_do_not_count_against_the_budget(
    reason: Reason, fault: Fault, counted: int
) -> None:
    expected = Expectation("one", "", restarted(reason))

    assert [failure.fault for failure in expected.failures] == [fault]
    assert (expected.restarts, expected.counted) == (1, counted)


def test_faults_are_selected_by_name() -> None:
    assert [expected.name for expected in select_expectations("drain,rank-sigkill")] == ["rank-sigkill", "drain"]
    assert select_expectations("") == EXPECTATIONS
    with pytest.raises(SystemExit, match="unknown fault drian"):
        select_expectations("drian")
