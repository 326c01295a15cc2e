"""Tests of reasons: the fault determines the action, and every failure has advice."""

import pytest

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault

FAILURE_REASONS = [reason for reason in Reason if reason.fault is not None]


@pytest.mark.parametrize("reason", FAILURE_REASONS)
def test_fault_determines_the_action(reason: Reason) -> None:
    """User and resource failures are never retried with an unchanged spec; all other failures are."""
    may_retry = reason.fault not in (Fault.USER, Fault.RESOURCE)
    assert (reason.action is FailureAction.RESTART) is may_retry
    assert reason.action is not FailureAction.REPAIR or reason.fault is Fault.RESOURCE


@pytest.mark.parametrize("reason", FAILURE_REASONS)
def test_every_failure_has_advice_in_lower_case_without_a_period(reason: Reason) -> None:
    assert reason.advice
    assert reason.advice[0] == reason.advice[0].lower() or reason.advice.startswith("CUDA")
    assert not reason.advice.endswith(".")
    assert reason.meaning.endswith(".")


def test_reasons_without_a_fault_have_no_advice() -> None:
    assert all(not reason.advice for reason in Reason if reason.fault is None)
